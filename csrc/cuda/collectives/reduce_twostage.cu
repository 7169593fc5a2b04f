#include "kernel_table.h"
#include "reduce_twostage.cuh"

namespace collx::cuda {

Kernel reduce_twostage(const Instance& i) {
  return for_dtype_and_world(
      i, [&]<DType D, int W>() { return as_kernel(reduce_twostage_kernel<Reduce<D>, W>); });
}

}  // namespace collx::cuda
