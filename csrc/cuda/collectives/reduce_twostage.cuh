// Reduce of large tensors in two stages: every rank sends a part, 1/(W-1) of the tensor, to each
// rank that is not the root. That rank reduces its part and sends the result to the root.
//
// Cost: the tensor once on each link, and two link latencies. The kernel uses the slots of the
// two-shot all-reduce. Every two ranks exchange words in both directions in every use, since the
// root sends in the first stage and receives in the second.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, int W>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    reduce_twostage_kernel(const __grid_constant__ KernelCall call,
                           const __grid_constant__ Routes routes) {
  using Wire = WireFor<Stage>;
  constexpr int kRanks = World<W>::kRanks, kScatter = 0, kGather = 1;
  Session<Tiles<false>> session(call);
  const int world = World<W>::size(call);

  const auto keep = [&](Slice slice) {
    if (routes.root != 0) copy_own(routes.kept, routes.to[0], slice);
  };
  // Sends to each rank except the root a vector of the part that it reduces.
  const auto scatter = [&](const Place& at) {
    load_and_send<Wire, kRanks>(
        session, world, slot_offset(call, kScatter, at.epoch, at.i),
        [&](int d) { return load(routes.from[d], Wire::data_index(at.vector)); },
        [&](int d) { return d != routes.root; });
  };
  const auto reduce = [&](const Place& at) {
    const auto parts = from_slots<Wire, kRanks>(session, Phase::arrival, at.epoch,
                                                slot_offset(call, kScatter, at.epoch, at.i), world,
                                                load(routes.from[0], Wire::data_index(at.vector)));
    char* root = call.outgoing[routes.root] + slot_offset(call, kGather, at.epoch, at.i);
    reduce_into<Stage>(call, world, parts, OneSlot<Wire>{root});
  };
  // On the root: receives a vector of every part.
  const auto gather = [&](const Place& at) {
    const auto sums =
        from_slots<Wire, kRanks>(session, Phase::gather, at.epoch,
                                 slot_offset(call, kGather, at.epoch, at.i), world, Vector{});
    sums.drain([&](const auto& v) {
      store_each<false>(call, routes, world, Wire::data_index(at.vector), v, ~(1u << call.rank));
    });
  };
  run_slots<Order::behind>(session, keep, scatter,
                           [&](const Place& at) { routes.root == 0 ? gather(at) : reduce(at); });
}

}  // namespace collx::cuda
