#include "kernel_table.h"
#include "norm_oneshot_pull.cuh"
#include "norm_twoshot_pull.cuh"

namespace collx::cuda {

// The barriers take far longer than the surrounding code, so one kernel serves all world sizes.
Kernel norm_oneshot_pull(const Instance& i) {
  return for_dtype<can_normalize>(
      i.dtype, [&]<DType D>() { return as_kernel(norm_oneshot_pull_kernel<Normalized<D>>); });
}

Kernel norm_twoshot_pull(const Instance& i) {
  return for_dtype<can_normalize>(
      i.dtype, [&]<DType D>() { return as_kernel(norm_twoshot_pull_kernel<Normalized<D>>); });
}

}  // namespace collx::cuda
