#include "kernel_table.h"
#include "reducescatter_multimem.cuh"

namespace collx::cuda {

Kernel reducescatter_multimem(const Instance& i) {
  return for_summed_dtype(i.dtype, [&]<DType D>() {
    return for_multicast(
        i, [&]<typename M>() { return as_kernel(reducescatter_multimem_kernel<Reduce<D>, M>); });
  });
}

}  // namespace collx::cuda
