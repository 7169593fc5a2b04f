// From the tensors of an all-reduce to the backend that carries it out.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"

namespace collx {

/// Both tensors are contiguous; they are the same memory or share nothing.
void run_allreduce(Communicator& communicator, const ReductionOptions& options,
                   const at::Tensor& input, const at::Tensor& output);

}  // namespace collx
