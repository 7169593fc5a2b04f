#include "kernel_table.h"
#include "reducescatter_direct.cuh"

namespace collx::cuda {

Kernel reducescatter_direct(const Instance& i) {
  return for_dtype_and_world(
      i, [&]<DType D, int W>() { return as_kernel(reducescatter_direct_kernel<Reduce<D>, W>); });
}

}  // namespace collx::cuda
