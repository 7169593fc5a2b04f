// Reducescatter and reduce on symmetric inputs: a rank pulls the values that it reduces from the
// peers' inputs. One loop between two barriers, without intermediate copies.
//
// Cost: the messages on each link. The last barrier states that all inputs may be overwritten.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, int W, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    reducescatter_direct_kernel(const __grid_constant__ KernelCall call,
                                const __grid_constant__ Routes routes,
                                const __grid_constant__ Epilogue... epilogue) {
  Session<BlockBarrier> session(call);
  const int world = World<W>::size(call);
  const bool reduces = !routes.has_root || routes.root == 0;
  const auto output = Stage::template output<false>(routes.to[0], epilogue...);

  run_between_barriers(session, [&] {
    if (!reduces) return copy_own(routes.from[0], routes.to[0]);
    for_own(call.vectors, [&](uint64_t i) {
      const auto inputs = from_memory<World<W>::kRanks>(world, [&](int rank) {
        return Run<>(routes.from[call.distance_to(rank, world)]).load_peer(i);
      });
      reduce_into<Stage>(call, world, inputs, TensorSink{output, i});
    });
  });
}

}  // namespace collx::cuda
