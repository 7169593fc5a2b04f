#include "kernel_table.h"
#include "norm_oneshot_push.cuh"

namespace collx::cuda {

Kernel norm_oneshot_push(const Instance& i) {
  return for_norm(i, [&]<DType D, int W, bool Simple>() {
    return for_common<D, Simple>(i, [&]<CommonNorm C>() {
      return as_kernel(norm_oneshot_push_kernel<Normalized<D, C>, W, Simple>);
    });
  });
}

}  // namespace collx::cuda
