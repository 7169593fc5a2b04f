// All-reduce, one-shot, by pushing: every rank stores its tensor into its slots at every peer,
// polls its own slots until all words are there, and reduces in rank order.
//
// Costs W-1 times the tensor on each link, and one flight over it: for small tensors.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W>
__global__ void __launch_bounds__(512, 2)
    oneshot_push(const __grid_constant__ RankView view, const __grid_constant__ KernelCall call) {
  using S = Slots<D>;
  constexpr int kRanks = World<W>::kRanks;
  Session session(view, call);
  const int world = World<W>::size(view), rank = view.rank;
  const VectorTensor<dtype_size(D)> input(call.input, call.numel), output(call.output, call.numel);
  const SlotArea& area = S::oneshot(view.layout);
  Tiles tiles(session, area, input.vectors());

  uint32_t use = 0;
  for (uint64_t done = 0; done < input.vectors(); done += tiles.capacity(), ++use) {
    const uint64_t left = input.vectors() - done;
    const uint32_t n = left < tiles.capacity() ? static_cast<uint32_t>(left) : tiles.capacity();
    // In a later use of the same tiles: re-arming comes before the words that let peers go on.
    if (use > 0) next_use();

    for (uint32_t i = tiles.first(); i < n; i += tiles.stride()) {
      const uint32_t epoch = tiles.epoch(i) + use;
      const uint64_t at = area.slot(world, 0, epoch & 1, rank) + uint64_t{i} * S::kWireBytes;
      const Vector own = S::sendable(input.load(done + i));
      if (!session.alive()) break;
#pragma unroll
      for (int hop = 1; hop < kRanks; ++hop) {
        if (hop < world) S::push(view.region[(rank + hop) % world] + at, own, epoch);
      }
    }

    for (uint32_t i = tiles.first(); i < n; i += tiles.stride()) {
      const uint32_t epoch = tiles.epoch(i) + use;
      const auto slot = [&](int source) {
        return view.region[rank] + area.slot(world, 0, epoch & 1, source) +
               uint64_t{i} * S::kWireBytes;
      };
      const Vector own = S::sendable(input.load(done + i));
      Vector v[kRanks];
      if (!await_vectors<S>(session, Phase::arrival, world, epoch, own, slot, v)) break;
      output.store(done + i, reduce_vectors<D>(v, world, call.reduce_op));
#pragma unroll
      for (int source = 0; source < kRanks; ++source) {
        if (source < world && source != rank) S::rearm(slot(source));
      }
    }
  }
  tiles.finish(session);
  session.finish();
}

struct Family {
  template <DType D, int W>
  static Kernel kernel() {
    return oneshot_push<D, W>;
  }
};

}  // namespace

Kernel allreduce_oneshot_push(DType dtype, int world) { return find_kernel<Family>(dtype, world); }

}  // namespace collx::cuda
