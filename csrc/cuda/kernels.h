// The kernels, by what they carry out: one table.
#pragma once

#include <functional>

#include "transports/kernel_call.cuh"

namespace collx::cuda {

/// std::runtime_error where there is none. `simple`: for the calls that session.cuh calls so.
Kernel require_kernel(Collective collective, Algorithm algorithm, DType dtype, int world,
                      bool simple);

/// Every kernel that may spin.
void for_each_kernel(const std::function<void(Kernel)>& visit);
/// Those of them that normalize, and the local one.
void for_each_norm_kernel(const std::function<void(Kernel)>& visit);

}  // namespace collx::cuda
