#include "allgather_multimem.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allgather_multimem(const Instance& i) {
  return for_multicast(i, [&]<typename M>() { return as_kernel(allgather_multimem_kernel<M>); });
}

}  // namespace collx::cuda
