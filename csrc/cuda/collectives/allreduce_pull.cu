#include "allreduce_oneshot_pull.cuh"
#include "allreduce_pull_push.cuh"
#include "allreduce_twoshot_pull.cuh"
#include "kernel_table.h"

namespace collx::cuda {

// The barriers take far longer than the surrounding code, so one kernel serves all calls.
Kernel allreduce_oneshot_pull(const Instance& i) {
  return for_dtype_and_world(
      i, [&]<DType D, int W>() { return as_kernel(allreduce_oneshot_pull_kernel<Reduce<D>, W>); });
}

Kernel allreduce_twoshot_pull(const Instance& i) {
  return for_dtype_and_world(
      i, [&]<DType D, int W>() { return as_kernel(allreduce_twoshot_pull_kernel<Reduce<D>, W>); });
}

Kernel allreduce_pull_push(const Instance& i) {
  return for_dtype_and_world(
      i, [&]<DType D, int W>() { return as_kernel(allreduce_pull_push_kernel<Reduce<D>, W>); });
}

}  // namespace collx::cuda
