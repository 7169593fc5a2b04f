#include "kernel_table.h"
#include "norm_twoshot_push_sums.cuh"

namespace collx::cuda {

Kernel norm_twoshot_push_sums(const Instance& i) {
  return for_norm(i, [&]<DType D, int W, bool Simple>() {
    return as_kernel(norm_twoshot_push_sums_kernel<Normalized<D>, W, Simple>);
  });
}

}  // namespace collx::cuda
