#include "gather_scatter_direct.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel gather_scatter_direct(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(gather_scatter_direct_kernel<W, Simple>); });
}

}  // namespace collx::cuda
