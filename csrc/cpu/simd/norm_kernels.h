// The arithmetic of a reduction fused with a normalization, row by row. docs/internals/numerics.md
// has the contract. As in reduce_kernels.h, one template (norm_template.h) is compiled for each
// level of vector instructions, and all levels give the same bits.
#pragma once

#include <array>
#include <cstdint>

#include "../../protocol/norm.h"
#include "../../protocol/types.h"
#include "expression_kernels.h"

namespace collx::cpu {

/// Rows are processed in float32 arrays of `norm_room(cols)` elements.
constexpr uint64_t norm_room(uint64_t cols) { return round_up<uint64_t>(cols, 128); }
/// The size of the array for the sums of a row's tree.
constexpr uint64_t norm_tree_room(uint64_t cols) { return norm_room(cols) / 8 + 32; }

/// Neighboring elements of one row: sums[i] = inputs[0][i] + ... + inputs[world-1][i] (+
/// residual[i]) for i < count.
struct NormPiece {
  const void* const* inputs;
  int world;
  const void* residual;  // null: none
  float* sums;
  void* residual_out;  // the sums in the dtype; null: not wanted
  uint64_t count;
};

/// A row whose sums are complete.
struct NormRow {
  float* values;  // the sums; overwritten
  float* tree;
  const float* gain;
  const float* bias;  // null: none
  uint64_t cols;
  const NormOptions* options;
  float given_scale;  // only for ScaleMode::tensor
  // The row's results; null: not wanted.
  void* normalized;
  char* quantized;
  char* scales;
  uint64_t scale_stride;  // bytes from one group's scale to the next
  // The epilogue, if there is one. It is applied in place to the first operand of `line`, a row of
  // the dtype.
  const Expression* epilogue;
  ExpressionKernel evaluate;
  Line line;
};

struct NormKernels {
  /// sum_rounded rounds sums to the dtype, and again after it has added the residual.
  void (*sum)(const NormPiece& piece);
  void (*sum_rounded)(const NormPiece& piece);
  /// Converts widened weights to the factors of the rows, and widened biases to their terms.
  void (*prepare)(float* values, uint64_t count, float offset, bool rounded);
  void (*finish)(const NormRow& row);
};

/// Expects float32, float16 or bfloat16; the kernels expect a FloatEnvironment.
const NormKernels& norm_kernels(DType dtype);

using NormKernelTable = std::array<NormKernels, 3>;  // in the order of DType

}  // namespace collx::cpu
