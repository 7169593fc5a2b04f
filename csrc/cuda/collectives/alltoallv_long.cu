#include "alltoallv_long.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel alltoallv_long(const Instance&) { return as_kernel(alltoallv_long_kernel); }

}  // namespace collx::cuda
