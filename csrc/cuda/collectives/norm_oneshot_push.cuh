// All-reduce and norm, one-shot, by pushing: every rank stores its rows into its slots at every
// peer, polls its own slots, and reduces, normalizes and quantizes every row, all in registers. If
// rows are scattered, a rank receives only the rows of its part.
//
// Cost: W-1 times the tensor on each link (if scattered: its other parts), and one link latency.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/pieces.cuh"
#include "../transports/result_row.cuh"

namespace collx::cuda {

template <typename Results, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, Simple ? World<W>::kBlocksHeld : kRowBlocksHeld)
    norm_oneshot_push_kernel(const __grid_constant__ KernelCall call,
                             const __grid_constant__ NormArguments norm,
                             const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Results::kDType;
  using Wire = SentinelWire<D>;
  constexpr int kRanks = World<W>::kRanks;
  call.touch();
  NormStage<Results, Simple> stage(norm, epilogue...);
  Session<Pieces<Simple>> session(call, norm);
  Pieces<Simple>& pieces = session.transport;
  const int world = World<W>::size(call);
  const bool scatters = !Simple && norm.scatters;
  const bool whole = stage.steps() == 1;  // of whole rows
  const auto exists = [&](uint64_t j) { return !scatters || norm.has_row(call.rank, j); };
  // `at` and `own` belong to the row that was pushed last: the slot of this thread's vector, and
  // this rank's vector. `next` is this rank's vector of the next row, which is pushed after all
  // vectors of the last row have arrived.
  PieceSlot at;
  Vector own, next;

  // Vector i of row j for a rank: of all rows, or of its part. It is a filler if that part is
  // shorter than the largest one: in every use, a tile must carry a word between every two ranks.
  const auto load = [&](int rank, uint64_t j, uint32_t i) {
    if (scatters && !norm.has_row(rank, j)) return Vector{};
    return matrix_row<D, Simple>(norm, call.input, scatters ? norm.row(rank, j) : j).load(i);
  };
  const auto look_up = [&](uint32_t step, uint64_t j) {
    const uint32_t i = stage.index(step);
    if (stage.has(i)) next = load(call.rank, j, i);
  };
  const auto push = [&](uint32_t step, uint32_t p, uint64_t j) {
    const uint32_t i = stage.index(step);
    if (!stage.has(i)) return;
    // Epoch, data and the poison word are in flight together.
    at = pieces.slot(0, p, threadIdx.x * kVectorBytes);
    own = next;
    if (!session.alive()) return;
    push_to_peers<Wire, kRanks>(call, world, at.offset, [&](int d) {
      return Wire::to_wire(scatters ? load(call.rank_at(d, world), j, i) : own);
    });
  };
  const auto receive = [&](uint32_t step, uint64_t j, RowValues<D>& x) {
    const uint32_t i = stage.index(step);
    if (!stage.has(i)) return;
    const Vector residual = exists(j) ? stage.residual(j, i) : Vector{};
    stage.sum(x, world,
              from_slots<Wire, kRanks>(session, Phase::arrival, at.epoch, at.offset, world,
                                       Wire::to_wire(own)),
              residual);
  };
  // Row j of the results. Rows of several steps are processed one at a time, each step in its own
  // use.
  const auto finish = [&](uint32_t p, uint64_t j, auto push_next) {
    const auto fetch = [&](uint32_t step, RowValues<D>& x) {
      if (!whole) {
        if (step > 0) pieces.next();
        look_up(step, j);
        push(step, p, j);
      }
      receive(step, j, x);
      push_next();
    };
    if (exists(j)) return stage.row(fetch, ResultRow<D, Simple>(norm, j));
    RowValues<D> none;
    for (uint32_t step = 0; step < stage.steps(); ++step) fetch(step, none);
  };
  run_rows(
      session, norm, [&] { stage.prefetch(); },
      [&](uint64_t j) {
        if (whole) look_up(0, j);
      },
      [&](uint32_t p, uint64_t j) {
        if (whole) push(0, p, j);
      },
      finish);
}

}  // namespace collx::cuda
