#include "allreduce_lanes.cuh"
#include "broadcast_lanes.cuh"
#include "exchange_lanes.cuh"
#include "kernel_table.h"

namespace collx::cuda {

Kernel allreduce_lanes(const Instance& i) {
  return for_dtype(i.dtype, [&]<DType D>() -> Kernel {
    const auto of = [&]<int W>() -> Kernel {
      return i.simple ? as_kernel(allreduce_lanes_kernel<Reduce<D>, W, true>)
                      : as_kernel(allreduce_lanes_kernel<Reduce<D>, W, false>);
    };
    return i.world == 2 ? of.template operator()<2>() : of.template operator()<0>();
  });
}

Kernel exchange_lanes(const Instance& i) {
  return for_dtype(i.dtype, [&]<DType D>() -> Kernel {
    if (i.world != 2) return as_kernel(exchange_lanes_kernel<Reduce<D>, 0, false>);
    return i.simple ? as_kernel(exchange_lanes_kernel<Reduce<D>, 2, true>)
                    : as_kernel(exchange_lanes_kernel<Reduce<D>, 2, false>);
  });
}

Kernel exchange_lanes_copy(const Instance& i) {
  const auto of = [&]<int W>() -> Kernel {
    return i.simple ? as_kernel(exchange_lanes_kernel<Copy, W, true>)
                    : as_kernel(exchange_lanes_kernel<Copy, W, false>);
  };
  return i.world == 2 ? of.template operator()<2>() : of.template operator()<0>();
}

Kernel broadcast_lanes(const Instance& i) {
  return i.simple ? as_kernel(broadcast_lanes_kernel<true>)
                  : as_kernel(broadcast_lanes_kernel<false>);
}

}  // namespace collx::cuda
