#include "kernel_table.h"
#include "norm_oneshot_pull.cuh"

namespace collx::cuda {

// The barriers take far longer than the code around them: one kernel for all worlds.
Kernel norm_oneshot_pull(const Instance& i) {
  return for_norm_dtype(
      i.dtype, [&]<DType D>() { return as_kernel(norm_oneshot_pull_kernel<Normalized<D>>); });
}

}  // namespace collx::cuda
