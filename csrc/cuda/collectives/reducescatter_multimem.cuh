// Reducescatter and reduce by multicast: a rank loads the sum of the values that it reduces.
// Symmetric inputs are read directly. Other inputs are staged in the region, in two alternating
// halves.
//
// Cost: a rank sends all of its own input and receives its result. The last barrier states that all
// inputs may be overwritten.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/multicast_messages.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, typename M, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, 2)
    reducescatter_multimem_kernel(const __grid_constant__ KernelCall call,
                                  const __grid_constant__ Routes routes,
                                  const __grid_constant__ PullArguments pull,
                                  const __grid_constant__ MulticastArguments multicast,
                                  const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Stage::kDType;
  Session<MulticastBarrier<M>> session(call, multicast);
  const int world = call.world;
  const bool reduces = !routes.has_root || routes.root == 0, staged = multicast.input == nullptr;
  const auto output = Stage::template output<false>(routes.to[0], epilogue...);
  const MessageRooms rooms(call, routes, pull);

  const auto stage = [&](const Half& half) {
    for (int d = 0; d < world; ++d) {
      if (routes.has_root && d != routes.root) continue;
      Vector* to = pull.staged(call, call.rank, half.parity) + rooms.first(d);
      for_own(half.count, [&](uint64_t i) { to[i] = load(routes.from[d], half.first + i); });
    }
  };
  const auto reduce = [&](const Half& half) {
    if (!reduces) {
      if (half.first == 0) copy_own(routes.from[0], routes.to[0]);
      return;
    }
    const auto region = staging_of_all<M, D>(call, pull, multicast, half.parity);
    const EveryMessage<M, D> inputs({call, multicast.input, pull.input, 0}, routes.from);
    for_own(half.count, [&](uint64_t i) {
      const uint64_t j = half.first + i;
      const TensorSink sink(output, j);
      staged ? reduce_into<Stage>(call, world, from_sums(region, rooms.first(0) + i), sink)
             : reduce_into<Stage>(call, world, from_sums(inputs, j), sink);
    });
  };
  run_barriers(session, !staged, call.vectors, staged ? rooms.each : call.vectors,
               step(stage, Phase::stage_barrier, staged), step(reduce));
}

}  // namespace collx::cuda
