// What the kernels of fused normalizations get besides a KernelCall, and where their results go.
#pragma once

#include "../../protocol/norm_plan.h"
#include "../../protocol/partition.h"
#include "reduce.cuh"
#include "vectors.cuh"

namespace collx::cuda {

/// A NormCall, by value.
struct NormArguments {
  const void* residual;
  const void* weight;
  const void* bias;
  void* residual_out;
  void* normalized;
  void* quantized;
  void* scale;
  uint64_t cols;
  uint32_t vectors;  // of a row
  uint32_t cluster_bits;
  NormShape shape;
  NormOptions options;
  bool scatters;
  // Divisions are left to the host: they take longer than a row's arithmetic.
  uint64_t rows;         // that the grid goes through: all, or as many as the largest part has
  uint32_t full_uses;    // of the slots, each of rows_per_use rows
  uint32_t last_use;     // rows of the one behind them
  Partition parts;       // of all rows, among the ranks
  uint64_t result_rows;  // of the residual and the results
  uint64_t first_row;    // which one of those that an epilogue sees is the first of them
  const float* given_scale;
  float* spill;

  /// Brings the lines of the arguments near, all at once; otherwise a call would wait for each when
  /// it comes to it.
  __device__ __forceinline__ void touch() const {
    ptx::touch(residual);
    ptx::touch(cols);
    ptx::touch(options.eps);
    ptx::touch(parts.quotient);
  }

  /// Blocks of a cluster stand side by side in the grid.
  __device__ __forceinline__ uint32_t cluster() const { return blockIdx.x >> cluster_bits; }
  __device__ __forceinline__ uint32_t clusters() const { return gridDim.x >> cluster_bits; }
  __device__ __forceinline__ uint32_t cluster_rank() const {
    return blockIdx.x & ((1u << cluster_bits) - 1);
  }
  /// Row j of a rank's part: whether it is there, and which one of all it is.
  __device__ __forceinline__ bool has_row(int owner, uint64_t j) const {
    return j < parts.part(owner).count;
  }
  __device__ __forceinline__ uint64_t row(int owner, uint64_t j) const {
    return parts.part(owner).start + j;
  }
  /// f(p) for each of the first n rows, or of as many positions, that is this cluster's.
  template <typename Index, typename F>
  __device__ __forceinline__ void for_own(Index n, F f) const {
    for (Index p = cluster(); p < n; p += clusters()) f(p);
  }
};

/// What a call asks for. Of a common one the kernel knows it, whatever the arguments say.
template <CommonNorm C>
struct Asked {
  static constexpr bool kCommon = C != CommonNorm::other;
  static constexpr bool kQuantizes = C == CommonNorm::e4m3fn_row || C == CommonNorm::e4m3fn_tensor;
  const NormArguments& norm;

  __device__ __forceinline__ NormOptions options() const {
    NormOptions o = norm.options;
    if constexpr (kCommon) {
      o.rounding = C == CommonNorm::parity          ? Rounding::parity
                   : C == CommonNorm::parity_weight ? Rounding::parity_weight
                                                    : Rounding::fp32;
      o.quantization = kQuantizes ? Quantization::e4m3fn : Quantization::none;
      o.scale_mode = C == CommonNorm::e4m3fn_tensor ? ScaleMode::tensor : ScaleMode::row;
    }
    return o;
  }
  __device__ __forceinline__ bool residual() const { return kCommon || norm.residual != nullptr; }
  __device__ __forceinline__ bool keeps_residual() const {
    return kCommon || norm.residual_out != nullptr;
  }
  __device__ __forceinline__ bool keeps_values() const {
    return kCommon ? !kQuantizes : norm.normalized != nullptr;
  }
  __device__ __forceinline__ bool quantizes() const {
    return kCommon ? kQuantizes : norm.quantized != nullptr;
  }
  __device__ __forceinline__ bool given_scale() const {
    return kCommon ? C == CommonNorm::e4m3fn_tensor : norm.given_scale != nullptr;
  }
};

/// Blocks of kFullBlock threads that a multiprocessor holds of the kernels that serve every world.
inline constexpr int kRowBlocksHeld = 2;

/// Row `row` of a matrix [.., cols].
template <DType D, bool Whole = false>
__device__ __forceinline__ DenseTensor<dtype_size(D), Whole> matrix_row(const NormArguments& norm,
                                                                        const void* matrix,
                                                                        uint64_t row) {
  return {static_cast<const char*>(matrix) + row * norm.cols * dtype_size(D), norm.cols};
}

/// The scale of vector i of a row: which one of the row it is, and whether its columns begin there.
template <DType D, bool Simple>
__device__ __forceinline__ uint32_t group_of(const NormArguments& norm, uint32_t i) {
  const NormOptions& o = norm.options;
  if (Simple || o.scale_mode != ScaleMode::group) return 0;
  return i * Elements<D>::kCount / static_cast<uint32_t>(o.quant_group_size);
}
template <DType D, bool Simple>
__device__ __forceinline__ bool leads_group(const NormArguments& norm, uint32_t i) {
  const NormOptions& o = norm.options;
  if (Simple || o.scale_mode != ScaleMode::group) return i == 0;
  return i * Elements<D>::kCount % static_cast<uint32_t>(o.quant_group_size) == 0;
}

/// Matrices of all ranks that lie here, by rank.
struct GatheredRows {
  const void* input[kMaxCudaRanks];
  int32_t world;
};

/// Row `row` of the results in this rank's tensors, if it is there: a sink, to which NormStage
/// hands a row's values. `i`: which vector of the row.
template <DType D, bool Simple>
class ResultRow {
  static constexpr int kCount = Elements<D>::kCount;

 public:
  __device__ ResultRow(const NormArguments& norm, uint64_t row, bool there = true)
      : norm_(norm), row_(row), there_(there) {}

  __device__ __forceinline__ uint64_t index() const { return row_; }
  __device__ __forceinline__ void residual(uint32_t i, Vector v) const {
    if (there_) matrix_row<D, Simple>(norm_, norm_.residual_out, row_).store(i, v);
  }
  __device__ __forceinline__ void normalized(uint32_t i, Vector v) const {
    if (there_) matrix_row<D, Simple>(norm_, norm_.normalized, row_).store(i, v);
  }
  /// A byte for each element of the vector, in the first words of v.
  __device__ __forceinline__ void quantized(uint32_t i, Vector v) const {
    if (!there_) return;
    const uint64_t column = uint64_t{i} * kCount;
    char* to = static_cast<char*>(norm_.quantized) + row_ * norm_.cols + column;
    const bool aligned = reinterpret_cast<uint64_t>(to) % kCount == 0;
    if (Simple || __builtin_expect(aligned && column + kCount <= norm_.cols, 1)) {
      if constexpr (kCount == 8) {
        *reinterpret_cast<uint2*>(to) = make_uint2(v.word[0], v.word[1]);
      } else {
        *reinterpret_cast<uint32_t*>(to) = v.word[0];
      }
    } else if constexpr (!Simple) {
      const uint64_t bytes = v.word[0] | static_cast<uint64_t>(v.word[1]) << 32;
#pragma unroll 1
      for (uint32_t e = 0; e < kCount && column + e < norm_.cols; ++e) {
        to[e] = static_cast<char>(bytes >> 8 * e);
      }
    }
  }
  /// Of the group that vector i leads.
  __device__ __forceinline__ void scale(uint32_t i, float value) const {
    if (!there_) return;
    const NormOptions& o = norm_.options;
    uint64_t at = row_;
    if (!Simple && o.scale_mode == ScaleMode::group) {
      const uint32_t group = group_of<D, Simple>(norm_, i);
      const uint64_t groups = norm_.cols / static_cast<uint32_t>(o.quant_group_size);
      at = o.column_major ? group * norm_.result_rows + row_ : row_ * groups + group;
    }
    const uint32_t stored = stored_scale(value, o.scale_type);
    if (scale_bytes(o.scale_type) == 4) {
      static_cast<uint32_t*>(norm_.scale)[at] = stored;
    } else if (scale_bytes(o.scale_type) == 2) {
      static_cast<uint16_t*>(norm_.scale)[at] = static_cast<uint16_t>(stored);
    } else {
      static_cast<uint8_t*>(norm_.scale)[at] = static_cast<uint8_t>(stored);
    }
  }

 private:
  const NormArguments& norm_;
  const uint64_t row_;
  const bool there_;
};

}  // namespace collx::cuda
