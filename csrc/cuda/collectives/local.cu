#include "kernel_table.h"
#include "norm_local.cuh"
#include "reduce_local.cuh"

namespace collx::cuda {

Kernel reduce_local(const Instance& i) {
  return for_dtype(i.dtype, [&]<DType D>() { return as_kernel(reduce_local_kernel<Reduce<D>>); });
}

Kernel norm_local(const Instance& i) {
  return for_dtype<can_normalize>(
      i.dtype, [&]<DType D>() { return as_kernel(norm_local_kernel<Normalized<D>>); });
}

}  // namespace collx::cuda
