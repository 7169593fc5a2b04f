// Allgather, alltoall and reducescatter through slots: every rank stores a message into its slots
// at every peer, polls its own slots until all words have arrived, and copies or reduces them.
//
// Cost: the messages on each link, and one link latency. Every two ranks exchange words in both
// directions in every use. Messages that are shorter than the longest one are padded with fillers.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    gather_scatter_staged_kernel(const __grid_constant__ KernelCall call,
                                 const __grid_constant__ Routes routes,
                                 const __grid_constant__ Epilogue... epilogue) {
  using Wire = WireFor<Stage>;
  constexpr int kRanks = World<W>::kRanks;
  Session<Tiles<Simple>> session(call);
  const int world = World<W>::size(call);

  const auto push = [&](const Place& at) {
    const uint64_t j = Wire::data_index(at.vector);
    Vector v[kRanks];
    load_each<Simple>(routes, world, j, v, kToAll);
    send_to_peers<Wire>(session, world, slot_offset(call, 0, at.epoch, at.i), v, kToAll,
                        routes.same);
  };
  const auto take = [&](const Place& at) {
    const uint64_t j = Wire::data_index(at.vector);
    const auto all = from_slots<Wire, kRanks>(session, Phase::arrival, at.epoch,
                                              slot_offset(call, 0, at.epoch, at.i), world,
                                              load<Simple>(routes.from[0], j));
    if constexpr (Stage::kReduces) {
      const auto output = Stage::template output<Simple>(routes.to[0], epilogue...);
      reduce_into<Stage, Simple>(call, world, all, TensorSink{output, j});
    } else {
      all.drain([&](const auto& v) { store_each<Simple>(call, routes, world, j, v); });
    }
  };
  run_slots<Order::behind>(
      session, [](Slice) {}, push, take);
}

}  // namespace collx::cuda
