#include "gather_scatter_staged.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel gather_scatter_staged(const Instance& i) {
  return for_all(i, [&]<DType D, int W, bool Simple>() {
    return as_kernel(gather_scatter_staged_kernel<Reduce<D>, W, Simple>);
  });
}

Kernel gather_scatter_staged_copy(const Instance& i) {
  return for_world_and_simple(i, [&]<int W, bool Simple>() {
    return as_kernel(gather_scatter_staged_kernel<Copy, W, Simple>);
  });
}

}  // namespace collx::cuda
