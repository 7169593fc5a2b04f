// Broadcast in a pipeline: the root sends each other rank a slice of its own, 1/(W-1) of the
// tensor; that rank forwards every word, as it arrives, to the ranks that are not the root.
//
// Costs the tensor once on the root's link, and two flights. In all-reduce's two-shot slots: the
// second stage carries fillers to the root, so that every two ranks exchange words in both
// directions in every use. The fillers use a direction of the links that is idle.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    broadcast_pipelined_kernel(const __grid_constant__ KernelCall call,
                               const __grid_constant__ Routes routes) {
  using Wire = MaskedWire;
  constexpr int kRanks = World<W>::kRanks, kScatter = 0, kForward = 1;
  Session<Tiles<Simple>> session(call);
  const int world = World<W>::size(call);
  const int root = call.rank_at(routes.root, world);

  // The root: a vector of each slice to the rank that forwards it.
  const auto scatter = [&](const Place& at) {
    load_and_send<Wire, kRanks>(
        session, world, slot_offset(call, kScatter, at.epoch, at.i),
        [&](int d) { return load<Simple>(routes.from[d], Wire::data_index(at.vector)); });
  };
  // Another rank: a vector of its slice, on to the others and to its output. The masks travel
  // along.
  const auto forward = [&](const Place& at) {
    char* slot = call.arriving + slot_offset(call, kScatter, at.epoch, at.i) +
                 static_cast<uint32_t>(root) * call.source_bytes;
    Vector wire{};
    const bool arrived = take_one<Wire>(session, Phase::arrival, root, at.epoch, slot, wire);
    if (arrived) {
      push_to_peers<Wire, kRanks>(call, world, slot_offset(call, kForward, at.epoch, at.i),
                                  [&](int d) { return d == routes.root ? Vector{} : wire; });
    }
    const Vector data = Wire::from_wire(wire);
    if (!arrived) return;
    store<Simple>(routes.to[routes.root], Wire::data_index(at.vector), data);
    Wire::rearm(slot);
  };
  // A vector of every slice that others forward; to the root, fillers, of which nothing is kept: it
  // expects no message.
  const uint32_t others = ~(~0u << world) & ~(1u << call.rank) & ~(1u << root);
  const auto gather = [&](const Place& at) {
    const Arrivals<kRanks> arrivals(call, slot_offset(call, kForward, at.epoch, at.i));
    const auto slices =
        from_slots_of<Wire>(session, Phase::gather, at.epoch, arrivals, others, Vector{});
    slices.drain([&](const auto& v) {
      store_each<Simple>(call, routes, world, Wire::data_index(at.vector), v, others);
    });
  };
  run_slots<Order::behind>(
      session, [&](Slice slice) { copy_own<Simple>(routes.from[0], routes.to[0], slice); },
      [&](const Place& at) { root == call.rank ? scatter(at) : forward(at); }, gather);
}

}  // namespace collx::cuda
