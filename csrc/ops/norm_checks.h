// The arguments of a fused normalization, checked, and the results that they ask for: what the
// operators and their Meta kernels have in common.
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

/// What strings and numbers say of a call on rows of `cols` elements. No tensor of the arguments is
/// read. ValueError names the argument.
NormOptions check_norm_options(const Operator& op, const Arguments& arguments, at::ScalarType input,
                               const c10::SymInt& cols);

/// Everything that shapes, dtypes and options say. ValueError or TypeError names the argument.
NormCheck check_norm(const Operator& op, const Arguments& arguments);

/// A tensor given for a result.
void check_norm_out(const Operator& op, const Arguments& arguments, const NormResultShape& shape,
                    const at::Tensor& out);

}  // namespace collx
