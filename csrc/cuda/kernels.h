// The kernels of a communicator: all that its calls can come to.
#pragma once

#include <functional>

#include "collectives/kernel_table.h"

namespace collx::cuda {

/// Every kernel that may spin, in a world of that size. `simulated`: with multicast by each rank's
/// own address, in place of those with a switch.
void for_each_kernel(int world, bool simulated, const std::function<void(Kernel)>& visit);
/// Those of them that normalize, and the local one.
void for_each_norm_kernel(int world, bool simulated, const std::function<void(Kernel)>& visit);

}  // namespace collx::cuda
