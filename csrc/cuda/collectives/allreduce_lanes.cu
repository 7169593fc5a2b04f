#include "allreduce_lanes.cuh"
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

}  // namespace collx::cuda
