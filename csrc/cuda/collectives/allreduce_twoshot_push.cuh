// All-reduce, two-shot, by pushing: every rank scatters its tensor to the owners of its parts. An
// owner polls its slots, reduces, and pushes the result to all ranks, which store it to their
// outputs.
//
// Cost: 2 (W-1)/W of the tensor on each link, and two link latencies.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

/// The location of the vectors of each part in the tensor. Each part has as many places as the
/// largest part has vectors: in every use, a tile must carry a word between every two ranks.
template <typename Wire, bool Simple>
class Parts {
 public:
  __device__ __forceinline__ Parts(const KernelCall& call, uint64_t vectors, int world)
      : call_(call), parts_(vectors, world) {}

  struct Found {
    uint64_t vector;  // index in the tensor
    bool has;         // false for a filler, and for a thread that holds a mask
  };
  __device__ __forceinline__ Found find(int owner, const Place& at) const {
    if constexpr (Simple && !Wire::kMasked) return {owner * call_.vectors + at.vector, true};
    const uint64_t j = Wire::data_index(at.vector);
    const Part part = parts_.part(owner);
    return {part.start + j, j < part.count};
  }

 private:
  const KernelCall& call_;
  const Partition parts_;
};

template <typename Stage, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    allreduce_twoshot_push_kernel(const __grid_constant__ KernelCall call,
                                  const __grid_constant__ Epilogue... epilogue) {
  using Wire = WireFor<Stage>;
  constexpr int kRanks = World<W>::kRanks, kScatter = 0, kGather = 1;
  Session<Tiles<Simple>> session(call);
  const int world = World<W>::size(call), rank = call.rank;
  const DenseTensor<Stage::kElementBytes, Simple> input(call.input, call.numel);
  const auto output = Stage::template output<Simple>(call.output, call.numel, epilogue...);
  using Output = decltype(output);
  const Parts<Wire, Simple> parts(call, input.vectors(), world);
  const auto load = [&](int owner, const Place& at) {
    const auto [vector, has] = parts.find(owner, at);
    return has ? input.load(vector) : Vector{};
  };
  const auto sink = [&](int owner, const Place& at) {
    const auto [vector, has] = parts.find(owner, at);
    return TensorSink(output, vector, has);
  };

  const auto scatter = [&](const Place& at) {
    load_and_send<Wire, kRanks>(session, world, slot_offset(call, kScatter, at.epoch, at.i),
                                [&](int d) { return load(call.rank_at(d, world), at); });
  };
  const auto reduce = [&](const Place& at) {
    const auto all_parts = from_slots<Wire, kRanks>(session, Phase::arrival, at.epoch,
                                                    slot_offset(call, kScatter, at.epoch, at.i),
                                                    world, Wire::own(load(rank, at)));
    const PeerSlots<Wire, kRanks> all{call, world, slot_offset(call, kGather, at.epoch, at.i)};
    reduce_into<Stage, Simple>(call, world, all_parts, Both{all, sink(rank, at)});
  };
  const auto gather = [&](const Place& at) {
    const auto sums =
        from_slots<Wire, kRanks>(session, Phase::gather, at.epoch,
                                 slot_offset(call, kGather, at.epoch, at.i), world, Vector{});
    // For few ranks, the loads of the epilogue start before the sums have arrived.
    constexpr bool kEarly = Output::kAhead > 0 && Output::kAhead * kRanks <= 4;
    typename Output::Ahead ahead[kRanks];
    const auto ask = [&](int owner) {
      const auto [vector, has] = parts.find(owner, at);
      if (has) ahead[owner] = output.ahead(vector);
    };
    const auto others = [&](auto f) {
#pragma unroll
      for (int owner = 0; owner < kRanks; ++owner) {
        if (owner < world && owner != rank) f(owner);
      }
    };
    if constexpr (kEarly) others(ask);
    sums.drain([&](const auto& v) {
      others([&](int owner) {
        if constexpr (!kEarly) ask(owner);
        const auto [vector, has] = parts.find(owner, at);
        if (has) output.store(vector, v[owner], ahead[owner]);
      });
    });
  };
  run_slots<Order::phases>(
      session, [](Slice) {}, scatter, reduce, gather);
}

}  // namespace collx::cuda
