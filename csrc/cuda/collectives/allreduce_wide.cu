#include "allreduce_wide.cuh"
#include "kernel_table.h"

namespace collx::cuda {

// Simple calls copy in bulk.
Kernel allreduce_wide(const Instance& i) {
  return for_dtype(i.dtype, [&]<DType D>() -> Kernel {
    if (!i.simple) return as_kernel(allreduce_wide_kernel<Reduce<D>, 0, false>);
    return i.world == 2 ? as_kernel(allreduce_wide_kernel<Reduce<D>, 2, true>)
                        : as_kernel(allreduce_wide_kernel<Reduce<D>, 0, true>);
  });
}

}  // namespace collx::cuda
