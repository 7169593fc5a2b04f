#include "allreduce_multimem_gather.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allreduce_multimem_gather(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() {
    return for_multicast(i, [&]<typename M>() {
      return as_kernel(allreduce_multimem_gather_kernel<Reduce<D>, W, M>);
    });
  });
}

}  // namespace collx::cuda
