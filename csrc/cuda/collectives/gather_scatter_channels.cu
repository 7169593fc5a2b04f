// Broadcast (one stage), gather, scatter, alltoallv and reduce through channels: senders store
// their messages into slots at the receivers, who poll them, and copy or reduce.
//
// Costs the messages on each link, and one flight over it.
#include "channels.cuh"

namespace collx::cuda {
namespace {

template <typename Combine, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    channels(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  Session<Simple> session(call, &routes);
  OneWay<Combine, W, Simple>(session, routes, call.vectors).run();
}

}  // namespace

Kernel gather_scatter_channels_reduce(const Instance& i) {
  return for_all(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(channels<Reduce<D>, W, Simple>); });
}

Kernel gather_scatter_channels_copy(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(channels<Copy, W, Simple>); });
}

}  // namespace collx::cuda
