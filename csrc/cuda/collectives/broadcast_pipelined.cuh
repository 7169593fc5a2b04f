// Broadcast in a pipeline: the root sends a different slice, 1/(W-1) of the tensor, to each other
// rank. That rank forwards every word, when it arrives, to the ranks that are not the root.
//
// Cost: the tensor once on the root's link, and two link latencies. The kernel uses the slots of
// the two-shot all-reduce. The second stage carries fillers to the root, so that every two ranks
// exchange words in both directions in every use. The fillers use an idle direction of the links.
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

  // On the root: sends a vector of each slice to the rank that forwards it.
  const auto scatter = [&](const Place& at) {
    load_and_send<Wire, kRanks>(
        session, world, slot_offset(call, kScatter, at.epoch, at.i),
        [&](int d) { return load<Simple>(routes.from[d], Wire::data_index(at.vector)); });
  };
  // On another rank: sends a vector of its slice to the other ranks and stores it to its output.
  // The masks are forwarded too.
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
  // Receives a vector of every slice that other ranks forward. The root receives fillers and stores
  // none of them: it expects no message.
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
