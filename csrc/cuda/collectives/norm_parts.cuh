// The common part of the two-shot norms that push: the rows of a part are scattered to their owner
// and summed there, and the owner sends results to all ranks.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/pieces.cuh"

namespace collx::cuda {

template <typename Results, int W, bool Simple>
struct NormParts {
  static constexpr DType D = Results::kDType;
  static constexpr int kScatter = 0, kGather = 1;  // of the slots
  static constexpr int kRanks = World<W>::kRanks;
  using Wire = SentinelWire<D>;

  __device__ __forceinline__ int world() const { return World<W>::size(session.call); }
  __device__ __forceinline__ PieceSlot slot(int stage_of_slots, uint32_t p, uint32_t byte) const {
    return session.transport.slot(stage_of_slots, p, byte);
  }

  /// Returns a filler if a part is shorter than the largest one: in every use, a tile must carry a
  /// word between every two ranks. All functions below exchange such rows and do not store them.
  __device__ __forceinline__ Vector load(int owner, uint64_t j, uint32_t i) const {
    if (!norm.has_row(owner, j)) return {};
    return matrix_row<D, Simple>(norm, session.call.input, norm.row(owner, j)).load(i);
  }

  __device__ __forceinline__ void scatter(uint32_t p, uint64_t j) const {
    const uint32_t i = stage.index();
    if (!stage.has(i)) return;
    const PieceSlot to = slot(kScatter, p, threadIdx.x * kVectorBytes);
    Vector v[kRanks];
    for_peers<kRanks>(world(), [&](int d) { v[d] = load(session.call.rank_at(d, world()), j, i); });
    if (!session.alive()) return;
    push_to_peers<Wire, kRanks>(session.call, world(), to.offset,
                                [&](int d) { return Wire::to_wire(v[d]); });
  }

  /// Processes row by row: scatters a row, then runs each of the steps.
  template <typename... Steps>
  __device__ __forceinline__ void run(Steps... steps) const {
    run_rows(
        session, norm, [&] { stage.prefetch(); }, [](uint64_t) {},
        [&](uint32_t p, uint64_t j) { scatter(p, j); },
        [&](uint32_t p, uint64_t j, auto push_next) {
          (steps(p, j), ...);
          push_next();
        });
  }

  /// The sum of this thread's vector in the row of this rank's part.
  __device__ __forceinline__ bool sum(uint32_t p, uint64_t j, RowValues<D>& x) const {
    const PieceSlot from = slot(kScatter, p, threadIdx.x * kVectorBytes);
    const Vector own = Wire::to_wire(load(session.call.rank, j, stage.index()));
    return add_up<D>(
        x, world(),
        from_slots<Wire, kRanks>(session, Phase::arrival, from.epoch, from.offset, world(), own));
  }

  /// Pushes results in wire format to all peers, at byte `byte` of the piece at position p.
  template <typename To>
  __device__ __forceinline__ void push_to_all(uint32_t p, uint32_t byte, Vector v) const {
    if (!session.alive()) return;
    PeerSlots<To, kRanks>{session.call, world(), slot(kGather, p, byte).offset}.put(v);
  }

  Session<Pieces<Simple>>& session;
  const NormArguments& norm;
  NormStage<Results, Simple>& stage;
};

}  // namespace collx::cuda
