// The additional arguments of the kernels of fused normalizations, and the layout of their rows.
#pragma once

#include "../../protocol/norm_plan.h"
#include "../../protocol/partition.h"
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
  uint32_t vectors;  // in a row
  uint32_t cluster_bits;
  NormShape shape;
  NormOptions options;
  bool scatters;
  // The host does the divisions: they take longer than the arithmetic of a row.
  uint64_t rows;       // rows that the grid processes: all rows, or the number of the largest part
  uint32_t full_uses;  // of the slots, each of rows_per_use rows
  uint32_t last_use;   // rows in the partial use after them
  Partition parts;     // of all rows, among the ranks
  uint64_t result_rows;  // rows of the residual and the results
  uint64_t first_row;    // index of the first of them among the rows that an epilogue sees
  const float* given_scale;
  float* spill;

  /// Loads the lines of the arguments into the cache, all at once. Otherwise a call would wait for
  /// each line at its first use.
  __device__ __forceinline__ void touch() const {
    ptx::touch(residual);
    ptx::touch(cols);
    ptx::touch(options.eps);
    ptx::touch(parts.quotient);
  }

  /// The blocks of a cluster are adjacent in the grid.
  __device__ __forceinline__ uint32_t cluster() const { return blockIdx.x >> cluster_bits; }
  __device__ __forceinline__ uint32_t clusters() const { return gridDim.x >> cluster_bits; }
  __device__ __forceinline__ uint32_t cluster_rank() const {
    return blockIdx.x & ((1u << cluster_bits) - 1);
  }
  /// Row j of a rank's part: whether it exists, and its index among all rows.
  __device__ __forceinline__ bool has_row(int owner, uint64_t j) const {
    return j < parts.part(owner).count;
  }
  __device__ __forceinline__ uint64_t row(int owner, uint64_t j) const {
    return parts.part(owner).start + j;
  }
  /// Calls f(p) for each of the first n rows or positions that belongs to this cluster.
  template <typename Index, typename F>
  __device__ __forceinline__ void for_own(Index n, F f) const {
    for (Index p = cluster(); p < n; p += clusters()) f(p);
  }
};

/// The options of a call. For a common norm they are compile-time constants, regardless of the
/// arguments.
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

/// The number of blocks of kFullBlock threads on a multiprocessor, for kernels that serve every
/// world size.
inline constexpr int kRowBlocksHeld = 2;

/// Row `row` of a matrix [.., cols].
template <DType D, bool Whole = false>
__device__ __forceinline__ DenseTensor<dtype_size(D), Whole> matrix_row(const NormArguments& norm,
                                                                        const void* matrix,
                                                                        uint64_t row) {
  return {static_cast<const char*>(matrix) + row * norm.cols * dtype_size(D), norm.cols};
}

template <DType D>
inline constexpr int kVectorElements = static_cast<int>(kVectorBytes) / dtype_size(D);

/// The scale of vector i of a row: its index in the row, and whether its columns begin at vector i.
template <DType D, bool Simple>
__device__ __forceinline__ uint32_t group_of(const NormArguments& norm, uint32_t i) {
  const NormOptions& o = norm.options;
  if (Simple || o.scale_mode != ScaleMode::group) return 0;
  return i * kVectorElements<D> / static_cast<uint32_t>(o.quant_group_size);
}
template <DType D, bool Simple>
__device__ __forceinline__ bool leads_group(const NormArguments& norm, uint32_t i) {
  const NormOptions& o = norm.options;
  if (Simple || o.scale_mode != ScaleMode::group) return i == 0;
  return i * kVectorElements<D> % static_cast<uint32_t>(o.quant_group_size) == 0;
}

/// The matrices of all ranks, gathered on this rank, by rank.
struct GatheredRows {
  const void* input[kMaxCudaRanks];
  int32_t world;
};

}  // namespace collx::cuda
