// The fused normalizations: kernels below autograd, Meta kernels, and the checks that they share.
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

/// Extends a request to the selection with the values that only a fused normalization has.
NormRequest norm_request(const Request& request, const NormOptions& options, NormResults results,
                         uint64_t rows, uint64_t cols);

Results norm(const Operator& op, const Arguments& arguments);
Results norm_meta(const Operator& op, const Arguments& arguments);

}  // namespace collx
