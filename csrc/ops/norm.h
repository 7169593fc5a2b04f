// The fused normalizations: below autograd, and on Meta.
#pragma once

#include "norm_checks.h"

namespace collx {

class Communicator;

/// What the plan of a call is made from, but for where its tensors lie.
NormRequest norm_request(const Communicator& communicator, const CallCore& core,
                         const NormOptions& options, NormResults results, uint64_t rows,
                         uint64_t cols);

Results norm(const Operator& op, const Arguments& arguments);
Results norm_meta(const Operator& op, const Arguments& arguments);

}  // namespace collx
