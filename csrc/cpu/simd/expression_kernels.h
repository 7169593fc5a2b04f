// Evaluates the expression of an epilogue on the CPU, some elements at a time. As in
// reduce_kernels.h one template (expression_template.h) is compiled for each level of vector
// instructions, and all levels give the same bits.
#pragma once

#include <cstdint>

#include "../../protocol/expression.h"

namespace collx::cpu {

/// Where elements of the operands lie, and in bytes how far one from the next: the result, the
/// value, then the extras and the coordinates (int64), by their numbers. Of several rows the
/// strides from one to the next stand behind those.
struct Line {
  char* const* data;
  const int64_t* strides;
  int64_t count;
  int64_t rows = 1;
};

/// Expects a FloatEnvironment.
using ExpressionKernel = void (*)(const Expression& expression, const Line& line);
ExpressionKernel expression_kernel();

ExpressionKernel portable_expression_kernel();
ExpressionKernel avx2_expression_kernel();
ExpressionKernel avx512_expression_kernel();

}  // namespace collx::cpu
