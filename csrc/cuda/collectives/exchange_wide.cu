#include "exchange_wide.cuh"
#include "kernel_table.h"

namespace collx::cuda {

// Simple calls copy in bulk.
Kernel exchange_wide(const Instance& i) {
  return for_dtype(i.dtype, [&]<DType D>() -> Kernel {
    if (!i.simple) return as_kernel(exchange_wide_kernel<Reduce<D>, 0, false>);
    return i.world == 2 ? as_kernel(exchange_wide_kernel<Reduce<D>, 2, true>)
                        : as_kernel(exchange_wide_kernel<Reduce<D>, 0, true>);
  });
}

Kernel exchange_wide_copy(const Instance& i) {
  if (!i.simple) return as_kernel(exchange_wide_kernel<Copy, 0, false>);
  return i.world == 2 ? as_kernel(exchange_wide_kernel<Copy, 2, true>)
                      : as_kernel(exchange_wide_kernel<Copy, 0, true>);
}

}  // namespace collx::cuda
