// Broadcast (one stage), gather, scatter, alltoallv and reduce through channels: senders store
// their messages into slots at the receivers, which poll them, and copy or reduce.
//
// Cost: the messages on each link, and one link latency.
#pragma once

#include "one_way.cuh"

namespace collx::cuda {

template <typename Stage, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    gather_scatter_channels_kernel(const __grid_constant__ KernelCall call,
                                   const __grid_constant__ Routes routes) {
  Session<Channels<World<W>::kRanks, Simple>> session(call, routes);
  run_one_way<Stage>(session, routes, World<W>::size(call));
}

}  // namespace collx::cuda
