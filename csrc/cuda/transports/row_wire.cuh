// The wire format of a row that its owner sends to all ranks: one plane for each kind of result,
// each in its own wire format.
//
// MEMORY LAYOUT  protocol/norm_plan.h: RowPlanes, in the tiles of a piece.
#pragma once

#include "result_row.cuh"
#include "wire.cuh"

namespace collx::cuda {

/// This thread's share of one plane.
template <typename Wire>
struct Plane {
  Wire wire;
  bool has;       // whether the call has such results and this thread has a share of them
  uint32_t byte;  // offset from the start of the piece
};

template <DType D, bool Simple>
class RowWire {
  static constexpr int kCount = kVectorElements<D>;

 public:
  __device__ explicit RowWire(const NormArguments& norm)
      : norm_(norm),
        planes_(norm.shape.threads, norm.residual_out != nullptr, norm.normalized != nullptr,
                dtype_size(D)) {}

  __device__ __forceinline__ Plane<SentinelWire<D>> residual() const {
    return {{}, norm_.residual_out != nullptr, planes_.residual + threadIdx.x * kVectorBytes};
  }
  __device__ __forceinline__ Plane<SentinelWire<D>> normalized() const {
    return {{}, norm_.normalized != nullptr, planes_.normalized + threadIdx.x * kVectorBytes};
  }
  __device__ __forceinline__ Plane<ByteWire<kCount>> quantized() const {
    return {ByteWire<kCount>(norm_.options.quantization), norm_.quantized != nullptr,
            planes_.quantized + threadIdx.x * kCount};
  }
  /// `i`: the index in the row of this thread's vector.
  __device__ __forceinline__ Plane<FloatWire> scale(uint32_t i) const {
    const bool has = norm_.quantized != nullptr && norm_.options.scale_mode != ScaleMode::tensor &&
                     leads_group<D, Simple>(norm_, i);
    return {{}, has, planes_.scales + group_of<D, Simple>(norm_, threadIdx.x) * 4};
  }

 private:
  const NormArguments& norm_;
  const RowPlanes planes_;
};

/// A sink for NormStage that sends values by put(plane, vector) and also stores them on this rank.
template <DType D, bool Simple, typename Put>
struct PassingSink {
  const RowWire<D, Simple>& wire;
  const Put put;
  const ResultRow<D, Simple> row;

  __device__ __forceinline__ uint64_t index() const { return row.index(); }
  __device__ __forceinline__ void residual(uint32_t i, Vector v) const {
    put(wire.residual(), v);
    row.residual(i, v);
  }
  __device__ __forceinline__ void normalized(uint32_t i, Vector v) const {
    put(wire.normalized(), v);
    row.normalized(i, v);
  }
  __device__ __forceinline__ void quantized(uint32_t i, Vector v) const {
    put(wire.quantized(), v);
    row.quantized(i, v);
  }
  __device__ __forceinline__ void scale(uint32_t i, float value) const {
    put(wire.scale(i), Vector{{bits_of(value)}});
    row.scale(i, value);
  }
};
template <DType D, bool Simple, typename Put>
PassingSink(const RowWire<D, Simple>&, Put, ResultRow<D, Simple>) -> PassingSink<D, Simple, Put>;

}  // namespace collx::cuda
