// The results of a fused normalization, as a sink for its rows.
#pragma once

#include "../arguments/norm_arguments.cuh"

namespace collx::cuda {

/// A sink for row `row` of the results in this rank's tensors. NormStage passes the values of the
/// row to it. `there`: whether this rank has the row. `i`: the index of the vector in the row.
template <DType D, bool Simple>
class ResultRow {
  static constexpr int kCount = kVectorElements<D>;

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
  /// Stores one byte for each element of the vector. The bytes are in the first words of v.
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
  /// Stores the scale of the group that begins at vector i.
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
