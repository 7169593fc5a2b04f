// Checks the arguments of a fused normalization and determines its results. The operators and their
// Meta kernels share this code.
#pragma once

#include <c10/core/SymIntArrayRef.h>

#include "epilogue.h"
#include "operator_table.h"

namespace collx {

struct NormResultShape {
  Output result;
  at::ScalarType dtype;
  c10::SymDimVector sizes;
  bool column_major = false;  // the last axis is the slowest

  c10::SymDimVector strides() const;
};

struct NormCheck : CallCore {
  NormOptions options;
  c10::SmallVector<NormResultShape, 4> results;
  std::shared_ptr<const KnownExpression> epilogue;  // null: none
};

/// Checks the strings and numbers of a call on rows of `cols` elements. Does not access tensors of
/// the arguments. Raises ValueError, which names the argument.
NormOptions check_norm_options(const Operator& op, const Arguments& arguments, at::ScalarType input,
                               const c10::SymInt& cols);

/// Checks shapes, dtypes and options. Raises ValueError or TypeError, which name the argument.
NormCheck check_norm(const Operator& op, const Arguments& arguments);

}  // namespace collx
