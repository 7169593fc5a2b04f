#include "alltoallv_device_splits.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel alltoallv_device_splits(const Instance& i) {
  return for_world(i.world, [&]<int W>() { return as_kernel(alltoallv_device_splits_kernel<W>); });
}

}  // namespace collx::cuda
