#include "allreduce_multimem_oneshot.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allreduce_multimem_oneshot(const Instance& i) {
  return for_summed_dtype(i.dtype, [&]<DType D>() {
    return for_multicast(i, [&]<typename M>() {
      return as_kernel(allreduce_multimem_oneshot_kernel<Reduce<D>, M>);
    });
  });
}

}  // namespace collx::cuda
