#include "alltoallv_device_splits.cuh"
#include "alltoallv_direct.cuh"
#include "alltoallv_long.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel alltoallv_device_splits(const Instance& i) {
  return for_world_and_simple(i, [&]<int W, bool Simple>() {
    return as_kernel(alltoallv_device_splits_kernel<W, Simple>);
  });
}

// Simple calls have whole vectors only.
Kernel alltoallv_direct(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(alltoallv_direct_kernel<W, Simple>); });
}

Kernel alltoallv_long(const Instance&) { return as_kernel(alltoallv_long_kernel); }

}  // namespace collx::cuda
