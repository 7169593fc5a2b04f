// The epilogue of a fused normalization on the CPU.
#pragma once

#include "../protocol/epilogue.h"
#include "../protocol/expression.h"

namespace collx::cpu {

/// What goes over each normalized row, which it takes rounded to the dtype and leaves so.
struct RowEpilogue {
  const Expression& expression;
  EpilogueArguments arguments = {};  // in the order of the results' elements
};

}  // namespace collx::cpu
