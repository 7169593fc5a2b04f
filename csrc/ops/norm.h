// The fused normalizations below autograd.
#pragma once

#include <torch/library.h>

#include "norm_checks.h"

namespace collx {

class Communicator;

/// What the plan of a call is made from, but for where its tensors lie.
NormRequest norm_request(const Communicator& communicator, const NormOperator& op,
                         const NormCheck& check, uint64_t rows, uint64_t cols);

/// Schemas of all of them.
void define_norms(torch::Library& library);
/// Their kernels for tensors on a device.
void add_norm_kernels(torch::Library& library, c10::DispatchKey key);

}  // namespace collx
