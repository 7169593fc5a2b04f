#include "kernel_table.h"
#include "reduce_local.cuh"

namespace collx::cuda {

Kernel reduce_local(const Instance& i) {
  return for_dtype(i.dtype, [&]<DType D>() { return as_kernel(reduce_local_kernel<Reduce<D>>); });
}

}  // namespace collx::cuda
