// The results of a row that its owner passes on to all, in planes: see NormPlanes.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/slots.cuh"

namespace collx::cuda {

/// Where this thread's share of a row's results lies, in bytes from the first of its piece.
template <DType D, bool Simple>
struct PassedRow {
  using Bytes = NarrowSlots<Elements<D>::kCount / 4>;  // a byte for each element of a vector
  using Word = NarrowSlots<1>;

  __device__ explicit PassedRow(const NormArguments& norm)
      : norm(norm),
        planes(norm.shape, norm.residual_out != nullptr, norm.normalized != nullptr,
               dtype_size(D)) {}

  __device__ __forceinline__ uint32_t residual() const {
    return planes.residual + threadIdx.x * kVectorBytes;
  }
  __device__ __forceinline__ uint32_t normalized() const {
    return planes.normalized + threadIdx.x * kVectorBytes;
  }
  __device__ __forceinline__ uint32_t quantized() const {
    return planes.quantized + threadIdx.x * Elements<D>::kCount;
  }
  /// Of the scale that this thread passes on, if it does so.
  __device__ __forceinline__ uint32_t scale() const {
    return planes.scales + group_of<D, Simple>(norm, threadIdx.x) * 4;
  }
  __device__ __forceinline__ bool has_scale(uint32_t i) const {
    return norm.quantized != nullptr && norm.options.scale_mode != ScaleMode::tensor &&
           leads_group<D, Simple>(norm, i);
  }

  const NormArguments& norm;
  const NormPlanes planes;
};

/// A sink that passes on what comes, by put.vector, put.bytes and put.word(byte, vector), and
/// stores it here.
template <DType D, bool Simple, typename Put>
struct PassingSink {
  const PassedRow<D, Simple>& at;
  const Put put;
  const ResultRow<D, Simple> row;

  __device__ __forceinline__ uint64_t index() const { return row.index(); }
  __device__ __forceinline__ void residual(uint32_t i, Vector v) const {
    put.vector(at.residual(), v);
    row.residual(i, v);
  }
  __device__ __forceinline__ void normalized(uint32_t i, Vector v) const {
    put.vector(at.normalized(), v);
    row.normalized(i, v);
  }
  __device__ __forceinline__ void quantized(uint32_t i, Vector v) const {
    put.bytes(at.quantized(), v);
    row.quantized(i, v);
  }
  __device__ __forceinline__ void scale(uint32_t i, float value) const {
    put.word(at.scale(), Vector{{bits_of(value)}});
    row.scale(i, value);
  }
};

}  // namespace collx::cuda
