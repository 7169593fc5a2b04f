// Evaluates the expression of an epilogue on the CPU, several elements at a time. As in
// reduce_kernels.h, one template (expression_template.h) is compiled for each level of vector
// instructions, and all levels give the same bits.
#pragma once

#include <cstdint>

#include "../../protocol/expression.h"

namespace collx::cpu {

/// The addresses of the operands' elements, and the strides from one element to the next in bytes:
/// the result, the value, then the extras and the coordinates (int64), by their numbers. If there
/// are several rows, the strides from one row to the next follow.
struct Line {
  char* const* data;
  const int64_t* strides;
  int64_t count;
  int64_t rows = 1;
};

/// Expects a FloatEnvironment.
using ExpressionKernel = void (*)(const Expression& expression, const Line& line);
ExpressionKernel expression_kernel();

}  // namespace collx::cpu
