#include "broadcast_pipelined.cuh"
#include "broadcast_twostage.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel broadcast_pipelined(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(broadcast_pipelined_kernel<W, Simple>); });
}

Kernel broadcast_twostage(const Instance& i) {
  return for_world(i.world, [&]<int W>() { return as_kernel(broadcast_twostage_kernel<W>); });
}

}  // namespace collx::cuda
