#include "broadcast_pipelined.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel broadcast_pipelined(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(broadcast_pipelined_kernel<W, Simple>); });
}

}  // namespace collx::cuda
