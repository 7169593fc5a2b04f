// The fused normalizations: kernels below autograd, and Meta kernels.
#pragma once

#include "norm_checks.h"

namespace collx {

/// Extends a request to the selection with the values that only a fused normalization has.
NormRequest norm_request(const Request& request, const NormOptions& options, NormResults results,
                         uint64_t rows, uint64_t cols);

Results norm(const Operator& op, const Arguments& arguments);
Results norm_meta(const Operator& op, const Arguments& arguments);

}  // namespace collx
