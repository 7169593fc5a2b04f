// The epilogue of a fused normalization on the CPU.
#pragma once

#include "../protocol/epilogue.h"
#include "../protocol/expression.h"

namespace collx::cpu {

/// Applies to each normalized row. Its input and its result are rounded to the dtype.
struct RowEpilogue {
  const Expression& expression;
  EpilogueArguments arguments = {};  // in the order of the results' elements
};

}  // namespace collx::cpu
