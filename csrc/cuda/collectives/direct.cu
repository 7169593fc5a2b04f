#include "gather_scatter_direct.cuh"
#include "kernel_table.h"
#include "reducescatter_direct.cuh"

namespace collx::cuda {

// Simple calls have whole vectors only.
Kernel gather_scatter_direct(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(gather_scatter_direct_kernel<W, Simple>); });
}

Kernel reducescatter_direct(const Instance& i) {
  return for_dtype_and_world(
      i, [&]<DType D, int W>() { return as_kernel(reducescatter_direct_kernel<Reduce<D>, W>); });
}

}  // namespace collx::cuda
