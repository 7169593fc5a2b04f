#include "kernel_table.h"
#include "norm_local.cuh"

namespace collx::cuda {

Kernel norm_local(const Instance& i) {
  return for_norm_dtype(i.dtype,
                        [&]<DType D>() { return as_kernel(norm_local_kernel<Normalized<D>>); });
}

}  // namespace collx::cuda
