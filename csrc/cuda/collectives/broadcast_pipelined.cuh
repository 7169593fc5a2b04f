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
  using S = MaskedSlots;
  constexpr int kRanks = World<W>::kRanks, kScatter = 0, kForward = 1;
  Session<Tiles<Simple>> session(call);
  const int world = World<W>::size(call);
  const int root = call.rank_at(routes.root, world);

  // The root: a vector of each slice to the rank that forwards it.
  const auto scatter = [&](const Place& at) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world) v[d] = load<Simple>(routes.from[d], data_index<S>(at.vector));
    }
    const uint32_t offset = slot_offset(call, kScatter, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world) continue;
      v[d] = S::sendable(v[d]);
      if (session.alive()) S::push(call.outgoing[d] + offset, v[d]);
    }
  };
  // Another rank: a vector of its slice, on to the others and to its output. The masks travel
  // along.
  const auto forward = [&](const Place& at) {
    char* slot = call.arriving + slot_offset(call, kScatter, at.epoch, at.i) +
                 static_cast<uint32_t>(root) * call.source_bytes;
    Vector wire{};
    const bool arrived = take_one<S>(session, Phase::arrival, root, at.epoch, slot, wire);
    const uint32_t offset = slot_offset(call, kForward, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world || !arrived) continue;
      S::push(call.outgoing[d] + offset, d == routes.root ? Vector{} : wire);
    }
    const Vector data = S::received(wire);
    if (!arrived) return;
    store<Simple>(routes.to[routes.root], data_index<S>(at.vector), data);
    S::rearm(slot);
  };
  // A vector of every slice that others forward; to the root, fillers, of which nothing is kept: it
  // expects no message.
  const uint32_t others = ~(~0u << world) & ~(1u << call.rank) & ~(1u << root);
  const auto gather = [&](const Place& at) {
    const Arrivals<kRanks> arrivals(call, slot_offset(call, kForward, at.epoch, at.i));
    const auto slices =
        from_slots_of<S>(session, Phase::gather, at.epoch, arrivals, others, Vector{});
    Vector v[kRanks];
    if (!slices.take(v)) return;
    store_each<Simple>(call, routes, world, data_index<S>(at.vector), v, others);
    slices.rearm();
  };
  run_slots<Order::behind>(
      session, [&](Slice slice) { copy_own<Simple>(routes.from[0], routes.to[0], slice); },
      [&](const Place& at) { root == call.rank ? scatter(at) : forward(at); }, gather);
}

}  // namespace collx::cuda
