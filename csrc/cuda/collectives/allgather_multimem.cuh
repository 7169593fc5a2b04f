// Allgather and broadcast by multicast: a rank stores its message to all ranks at once. Symmetric
// outputs are written directly. Otherwise the messages go through the region, in two alternating
// halves.
//
// Cost: a rank sends its own message and receives the messages of all senders. Results are
// bit-exact copies.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/multicast_messages.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename M>
__global__ void __launch_bounds__(kFullBlock, 2)
    allgather_multimem_kernel(const __grid_constant__ KernelCall call,
                              const __grid_constant__ Routes routes,
                              const __grid_constant__ PullArguments pull,
                              const __grid_constant__ MulticastArguments multicast) {
  constexpr DType kBytes = DType::uint8;
  Session<MulticastBarrier<M>> session(call, multicast);
  const bool sends = !routes.has_root || routes.root == 0, direct = multicast.output != nullptr;
  const MessageRooms rooms(call, routes, pull);

  const auto send = [&](const Half& half) {
    if (!sends) return;
    const EveryMessage<M, kBytes> outputs({call, multicast.output, pull.output, 0}, routes.to);
    const auto region = staging_of_all<M, kBytes>(call, pull, multicast, half.parity);
    for_own(half.count, [&](uint64_t i) {
      const uint64_t j = half.first + i;
      const Vector v = load(routes.from[0], j);
      if (direct) return outputs.store(j, v);
      region.store(rooms.first(0) + i, v);
      store(routes.to[0], j, v);
    });
  };
  const auto take = [&](const Half& half) {
    for (int d = 1; d < call.world; ++d) {
      if (routes.has_root && d != routes.root) continue;
      const Vector* from = pull.staged(call, call.rank, half.parity) + rooms.first(d);
      for_own(half.count, [&](uint64_t i) {
        store(routes.to[d], half.first + i, ptx::ld_relaxed_sys(from + i));
      });
    }
  };
  run_barriers(session, direct, call.vectors, direct ? call.vectors : rooms.each,
               step(send, direct ? Phase::none : Phase::gather), step(take, Phase::none, !direct));
}

}  // namespace collx::cuda
