#include "allreduce_oneshot_push.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allreduce_oneshot_push(const Instance& i) {
  return for_all(i, [&]<DType D, int W, bool Simple>() {
    return as_kernel(allreduce_oneshot_push_kernel<Reduce<D>, W, Simple>);
  });
}

}  // namespace collx::cuda
