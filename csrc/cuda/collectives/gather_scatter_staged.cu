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
  Tiles<Simple> tiles(call);

  uint32_t use = 0, n = 0;
  for (uint64_t done = 0; Simple || done < call.vectors; done += n) {
    const uint64_t left = call.vectors - done;
    n = Simple || left < call.capacity ? static_cast<uint32_t>(left) : call.capacity;
    if (!Simple && use > 0) next_use();

    const auto push = [&](uint32_t i) {
      const uint32_t epoch = tiles.epoch(i) + use;
      const uint64_t j = data_index<S>(done + i);
      Vector v[kRanks];
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        if (d < world) v[d] = d > 1 && routes.same ? v[1] : load<Simple>(routes.sent[d], j);
      }
      const uint32_t at = slot_offset<S>(call, 0, epoch, i);
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        if (d >= world) continue;
        if (d == 1 || !routes.same) v[d] = S::sendable(v[d]);
        if (session.alive()) S::push(call.outgoing[d] + at, routes.same ? v[1] : v[d], epoch);
      }
    };

    const auto take = [&](uint32_t i) {
      const uint32_t epoch = tiles.epoch(i) + use;
      const uint64_t j = data_index<S>(done + i);
      const Vector own = load<Simple>(routes.sent[0], j);
      const Arrivals<kRanks> arrivals(call, slot_offset<S>(call, 0, epoch, i));
      Vector v[kRanks];
      const bool arrived =
          await_vectors<S>(session, Phase::arrival, world, epoch, own, arrivals, v);
#pragma unroll
      for (int source = 0; source < kRanks; ++source) {
        if (source < world && source != call.rank) v[source] = S::received(v[source]);
      }
      if (!arrived) return;
      Combine::template store<Simple>(call, routes, world, j, v);
      arrivals.template rearm<S>(world);
    };

    if constexpr (Simple) {
      tiles.for_own(n, [&](uint32_t i) {
        push(i);
        take(i);
      });
      use = 1;
      break;
    } else {
      tiles.for_own_behind(n, push, take);
      ++use;
    }
  }
  tiles.finish(session, use, n);
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
