// All kernels that a communicator's calls can launch.
#pragma once

#include <functional>

#include "collectives/kernel_table.h"

namespace collx::cuda {

/// Visits every kernel that may spin, for a world of that size. `simulated`: multicast kernels that
/// use each rank's own address replace those that use a switch.
void for_each_kernel(int world, bool simulated, const std::function<void(Kernel)>& visit);
/// Visits the kernels among them that normalize, including the local one.
void for_each_norm_kernel(int world, bool simulated, const std::function<void(Kernel)>& visit);

}  // namespace collx::cuda
