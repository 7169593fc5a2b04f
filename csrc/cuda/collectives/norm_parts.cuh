// What the two-shot norms that push have in common: the rows of a part, scattered to their owner
// and summed up there, and the way from an owner to all.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/pieces.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {

template <DType D, int W, bool Simple>
class NormParts {
 protected:
  enum Stage { kScatter, kGather };
  using S = SentinelSlots<D>;
  using E = Elements<D>;
  using OwnRow = ResultRow<D, Simple>;
  static constexpr int kRanks = World<W>::kRanks;

  __device__ NormParts(Session<Simple>& session, const NormArguments& norm,
                       NormStage<D, Simple>& stage)
      : session_(session),
        call_(session.call),
        norm_(norm),
        world_(World<W>::size(call_)),
        stage_(stage),
        pieces_(call_, norm) {}

  /// Goes through all uses of the slots: scatters, then `reduce(p, j)` of this rank's rows, then
  /// `gather(p, j)` of all; row j of a part at position p.
  template <typename Reduce, typename Gather>
  __device__ __forceinline__ void run_uses(Reduce reduce, Gather gather) {
    run_rows(
        session_, pieces_, norm_, [this] { stage_.prefetch(); },
        [this](uint32_t p, uint64_t j) { scatter(p, j); }, reduce, gather);
  }

  __device__ __forceinline__ int peer(int distance) const {
    return (call_.rank + distance) % world_;
  }
  __device__ __forceinline__ bool exists(int owner, uint64_t j) const {
    return j < norm_.parts.part(owner).count;
  }
  /// Of the whole tensor, row j of a rank's part.
  __device__ __forceinline__ uint64_t row(int owner, uint64_t j) const {
    return norm_.parts.part(owner).start + j;
  }

  /// A filler where a part is shorter than the largest, since every use of a tile carries a word
  /// between every two ranks. Here and in all that follows: such rows are exchanged and not stored.
  __device__ __forceinline__ Vector load(int owner, uint64_t j, uint32_t i) const {
    if (!exists(owner, j)) return {};
    const char* input = static_cast<const char*>(call_.input);
    return VectorTensor<dtype_size(D), Simple>(input + row(owner, j) * norm_.cols * dtype_size(D),
                                               norm_.cols)
        .load(i);
  }

  __device__ __forceinline__ void scatter(uint32_t p, uint64_t j) const {
    const uint32_t i = stage_.index();
    if (!stage_.has(i)) return;
    const PieceSlot to = pieces_.slot(kScatter, p, threadIdx.x * kVectorBytes);
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) v[d] = load(peer(d), j, i);
    }
    if (!session_.alive()) return;
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(call_.outgoing[d] + to.offset, S::sendable(v[d]));
    }
  }

  /// The sum of this thread's vector in the row of this rank's part.
  __device__ __forceinline__ bool sum(uint32_t p, uint64_t j, Share<D>& x) {
    const PieceSlot from = pieces_.slot(kScatter, p, threadIdx.x * kVectorBytes);
    const Vector own = S::sendable(load(call_.rank, j, stage_.index()));
    const Arrivals<kRanks> arrivals(call_, from.offset);
    Vector v[kRanks];
    if (!await_vectors<S>(session_, Phase::arrival, world_, from.epoch, own, arrivals, v)) {
      return false;
    }
    arrivals.template rearm<S>(world_);
    fold<D>(x, v, world_, [](float a, float b) { return a + b; });
    return true;
  }

  template <typename T>
  __device__ __forceinline__ void push_to_all(uint32_t p, uint32_t byte, Vector v) const {
    if (!session_.alive()) return;
    const PieceSlot to = pieces_.slot(kGather, p, byte);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) T::push(call_.outgoing[d] + to.offset, v);
    }
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const NormArguments& norm_;
  const int world_;
  NormStage<D, Simple>& stage_;
  Pieces pieces_;
};

}  // namespace collx::cuda
