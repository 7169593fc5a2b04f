#include "allgather_multimem.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allgather_multimem(const Instance& i) {
  return i.simulated ? as_kernel(allgather_multimem_kernel<Simulated>)
                     : as_kernel(allgather_multimem_kernel<Switch>);
}

}  // namespace collx::cuda
