// Allgather, alltoall and reducescatter through slots: every rank stores a message into its slots
// at every peer, polls its own slots until all words are there, and copies or reduces them.
//
// Costs the messages on each link, and one flight over it. Every two ranks exchange words in both
// directions in every use, fillers where a message is shorter than the longest.
#include "../stages/combine.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <typename Combine, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    exchange(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  using S = typename Combine::Slots;
  constexpr int kRanks = World<W>::kRanks;
  Session<Simple> session(call);
  const int world = World<W>::size(call);

  const auto push = [&](const Place& at) {
    const uint64_t j = data_index<S>(at.vector);
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world) v[d] = d > 1 && routes.same ? v[1] : load<Simple>(routes.from[d], j);
    }
    const uint32_t offset = slot_offset(call, 0, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world) continue;
      if (d == 1 || !routes.same) v[d] = S::sendable(v[d]);
      if (session.alive()) S::push(call.outgoing[d] + offset, routes.same ? v[1] : v[d]);
    }
  };

  const auto take = [&](const Place& at) {
    const uint64_t j = data_index<S>(at.vector);
    const Vector own = load<Simple>(routes.from[0], j);
    const Arrivals<kRanks> arrivals(call, slot_offset(call, 0, at.epoch, at.i));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session, Phase::arrival, world, at.epoch, own, arrivals, v);
    unmask<S>(call, world, v);
    if (!arrived) return;
    Combine::template store<Simple>(call, routes, world, j, v);
    arrivals.template rearm<S>(world);
  };

  run_slots<Order::behind>(
      session, [] {}, push, take);
}

}  // namespace

Kernel gather_scatter_staged_reduce(const Instance& i) {
  return for_all(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(exchange<Reduce<D>, W, Simple>); });
}

Kernel gather_scatter_staged_copy(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(exchange<Copy, W, Simple>); });
}

}  // namespace collx::cuda
