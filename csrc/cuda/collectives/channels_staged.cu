// Broadcast (one stage), gather, scatter, alltoallv and reduce through channels: senders store
// their messages into slots at the receivers, who poll them, and copy or reduce.
//
// Costs the messages on each link, and one flight over it.
#include "channels.cuh"

namespace collx::cuda {
namespace {

template <typename Combine, int W, bool Simple>
__global__ void __launch_bounds__(512, 2)
    channels(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  Session<Simple> session(call, &routes);
  OneWay<Combine, W, Simple>(session, routes, call.vectors).run();
}

template <bool Simple>
struct Reducing {
  template <DType D, int W>
  static Kernel kernel() {
    return reinterpret_cast<Kernel>(channels<Reduce<D>, W, Simple>);
  }
};

template <bool Simple>
struct Copying {
  template <int W>
  static Kernel kernel() {
    return reinterpret_cast<Kernel>(channels<Copy, W, Simple>);
  }
};

}  // namespace

Kernel channels_staged(bool reduces, DType dtype, int world, bool simple) {
  if (!reduces) {
    return simple ? find_world<Copying<true>>(world) : find_world<Copying<false>>(world);
  }
  return simple ? find_kernel<Reducing<true>>(dtype, world)
                : find_kernel<Reducing<false>>(dtype, world);
}

}  // namespace collx::cuda
