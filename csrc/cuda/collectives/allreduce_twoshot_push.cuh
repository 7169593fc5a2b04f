// All-reduce, two-shot, by pushing: every rank scatters its tensor to the owners of its parts; an
// owner polls, reduces, and pushes the result to all; everyone drains.
//
// Costs 2 (W-1)/W of the tensor on each link, and two flights over it.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

/// The vectors of a tensor by parts, each of them as many as the largest part has: every use of a
/// tile must carry a word between every two ranks.
template <typename S, int Bytes, bool Simple>
class PartedTensor {
 public:
  __device__ __forceinline__ PartedTensor(const KernelCall& call, const void* data, int world)
      : call_(call), tensor_(data, call.numel), parts_(tensor_.vectors(), world) {}

  /// A filler where a part has no such vector, and for a thread that has a mask.
  __device__ __forceinline__ Vector load(int owner, const Place& at) const {
    if constexpr (kEqual) return tensor_.load(owner * call_.vectors + at.vector);
    const uint64_t j = data_index<S>(at.vector);
    const Part part = parts_.part(owner);
    return j < part.count ? tensor_.load(part.start + j) : Vector{};
  }
  __device__ __forceinline__ void store(int owner, const Place& at, Vector v) const {
    if constexpr (kEqual) return tensor_.store(owner * call_.vectors + at.vector, v);
    const uint64_t j = data_index<S>(at.vector);
    const Part part = parts_.part(owner);
    if (j < part.count) tensor_.store(part.start + j, v);
  }

 private:
  static constexpr bool kEqual = Simple && !S::kMasked;
  const KernelCall& call_;
  const DenseTensor<Bytes, Simple> tensor_;
  const Partition parts_;
};

/// Of such a tensor the vector at a place of one part.
template <typename Tensor>
struct PartSink {
  const Tensor& tensor;
  int owner;
  const Place& at;

  __device__ __forceinline__ Vector prepare(Vector v) const { return v; }
  __device__ __forceinline__ void put(Vector v) const { tensor.store(owner, at, v); }
};
template <typename Tensor>
PartSink(const Tensor&, int, const Place&) -> PartSink<Tensor>;

template <typename Stage, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    allreduce_twoshot_push_kernel(const __grid_constant__ KernelCall call) {
  using S = typename Stage::Slots;
  using Tensor = PartedTensor<S, Stage::kElementBytes, Simple>;
  constexpr int kRanks = World<W>::kRanks, kScatter = 0, kGather = 1;
  Session<Tiles<Simple>> session(call);
  const int world = World<W>::size(call), rank = call.rank;
  const Tensor input(call, call.input, world), output(call, call.output, world);

  const auto scatter = [&](const Place& at) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world) v[d] = input.load(call.rank_at(d, world), at);
    }
    const uint32_t offset = slot_offset(call, kScatter, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world) continue;
      v[d] = S::sendable(v[d]);
      if (session.alive()) S::push(call.outgoing[d] + offset, v[d]);
    }
  };
  const auto reduce = [&](const Place& at) {
    const auto parts = from_slots<S, kRanks>(session, Phase::arrival, at.epoch,
                                             slot_offset(call, kScatter, at.epoch, at.i), world,
                                             S::own(input.load(rank, at)));
    const PeerSlots<S, kRanks> all{call, world, slot_offset(call, kGather, at.epoch, at.i)};
    reduce_into<Stage, Simple>(call, world, parts, Both{all, PartSink{output, rank, at}});
  };
  const auto gather = [&](const Place& at) {
    const auto sums =
        from_slots<S, kRanks>(session, Phase::gather, at.epoch,
                              slot_offset(call, kGather, at.epoch, at.i), world, Vector{});
    Vector v[kRanks];
    if (!sums.take(v)) return;
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner < world && owner != rank) output.store(owner, at, v[owner]);
    }
    sums.rearm();
  };
  run_slots<Order::phases>(
      session, [](Slice) {}, scatter, reduce, gather);
}

}  // namespace collx::cuda
