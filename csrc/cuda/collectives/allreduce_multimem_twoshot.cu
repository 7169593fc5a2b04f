#include "allreduce_multimem_twoshot.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allreduce_multimem_twoshot(const Instance& i) {
  return for_summed_dtype(i.dtype, [&]<DType D>() {
    return for_multicast(i, [&]<typename M>() {
      return as_kernel(allreduce_multimem_twoshot_kernel<Reduce<D>, M>);
    });
  });
}

}  // namespace collx::cuda
