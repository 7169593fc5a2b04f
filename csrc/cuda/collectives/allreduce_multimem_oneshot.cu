#include "allreduce_multimem_oneshot.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allreduce_multimem_oneshot(const Instance& i) {
  return for_summed_dtype(i.dtype, [&]<DType D>() {
    return i.simulated ? as_kernel(allreduce_multimem_oneshot_kernel<Reduce<D>, Simulated>)
                       : as_kernel(allreduce_multimem_oneshot_kernel<Reduce<D>, Switch>);
  });
}

}  // namespace collx::cuda
