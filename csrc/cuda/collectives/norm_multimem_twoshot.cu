#include "kernel_table.h"
#include "norm_multimem_twoshot.cuh"

namespace collx::cuda {

Kernel norm_multimem_twoshot(const Instance& i) {
  return for_norm_dtype(i.dtype, [&]<DType D>() {
    return for_multicast(
        i, [&]<typename M>() { return as_kernel(norm_multimem_twoshot_kernel<Normalized<D>, M>); });
  });
}

}  // namespace collx::cuda
