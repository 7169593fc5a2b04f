#include "gather_scatter_channels.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel gather_scatter_channels(const Instance& i) {
  return for_all(i, [&]<DType D, int W, bool Simple>() {
    return as_kernel(gather_scatter_channels_kernel<Reduce<D>, W, Simple>);
  });
}

Kernel gather_scatter_channels_copy(const Instance& i) {
  return for_world_and_simple(i, [&]<int W, bool Simple>() {
    return as_kernel(gather_scatter_channels_kernel<Copy, W, Simple>);
  });
}

}  // namespace collx::cuda
