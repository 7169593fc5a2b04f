// All-reduce and norm, two-shot, by pulling: every rank reduces, normalizes and quantizes its part
// of the rows into its region. After a barrier, every rank gathers from the regions. Symmetric
// inputs are read directly. Other inputs are staged first.
//
// Cost: (W-1)/W of the tensor on each link, then (W-1)/W of the results, and a barrier for each
// step of each chunk.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/result_row.cuh"
#include "../transports/row_wire.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Results, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, kRowBlocksHeld)
    norm_twoshot_pull_kernel(const __grid_constant__ KernelCall call,
                             const __grid_constant__ NormArguments norm,
                             const __grid_constant__ PullArguments pull,
                             const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Results::kDType;
  using Row = ResultRow<D, false>;
  Session<BlockBarrier> session(call);
  const RowWire<D, false> wire(norm);
  NormStage<Results, false> stage(norm, epilogue...);
  const uint32_t i = stage.index();
  const bool staged = pull.input[0] == nullptr;
  // This thread's vector of the row at position p for `owner`, in the inputs that a rank has
  // staged.
  const auto staging = [&](int rank, int owner, const Half& half, uint64_t p) {
    const uint64_t row = static_cast<uint64_t>(owner) * norm.shape.rows_per_use + p;
    return pull.staged(call, rank, half.parity) + row * norm.vectors + i;
  };
  // This block's piece of the results that a rank passes on at position p.
  const auto piece_of = [&](int rank, const Half& half, uint64_t p) {
    const uint64_t piece = (p << norm.cluster_bits) + norm.cluster_rank();
    return reinterpret_cast<char*>(pull.passed(call, rank, half.parity)) +
           piece * norm.shape.piece_tiles * kTileBytes;
  };

  const auto stage_inputs = [&](const Half& half) {
    if (!stage.has(i)) return;
    norm.for_own(half.count, [&](uint64_t p) {
      const uint64_t j = half.first + p;
      for (int owner = 0; owner < call.world; ++owner) {
        if (owner == call.rank || !norm.has_row(owner, j)) continue;
        *staging(call.rank, owner, half, p) =
            matrix_row<D>(norm, call.input, norm.row(owner, j)).load(i);
      }
    });
  };
  const auto finish_own = [&](const Half& half) {
    norm.for_own(half.count, [&](uint64_t p) {
      if (!norm.has_row(call.rank, half.first + p)) return;
      const uint64_t r = norm.row(call.rank, half.first + p);
      const auto fetch = [&](uint32_t, RowValues<D>& x) {
        if (!stage.has(i) || !session.alive()) return;
        const auto inputs = from_memory<kMaxCudaRanks>(call.world, [&](int rank) {
          if (rank == call.rank) return matrix_row<D>(norm, call.input, r).load(i);
          return staged ? ptx::ld_relaxed_sys(staging(rank, call.rank, half, p))
                        : matrix_row<D>(norm, pull.input[rank], r).load_peer(i);
        });
        stage.sum(x, call.world, inputs, stage.residual(r, i));
      };
      char* piece = piece_of(call.rank, half, p);
      const auto put = [=]<typename W>(const Plane<W>& to, Vector v) {
        W::push(piece + to.byte, v);
      };
      stage.row(fetch, PassingSink(wire, put, Row(norm, r)));
    });
  };
  const auto copy_results = [&](const char* piece, const Row& to) {
    Vector v{};
    const auto find = [&]<typename W>(const Plane<W>& from) {
      if (from.has) W::poll(piece + from.byte, v);
      return from.has;
    };
    if (find(wire.residual())) to.residual(i, v);
    if (find(wire.normalized())) to.normalized(i, v);
    if (find(wire.quantized())) to.quantized(i, v);
    if (find(wire.scale(i))) to.scale(i, float_of(v.word[0]));
  };
  const auto gather = [&](const Half& half) {
    if (!stage.has(i) || !session.alive()) return;
    norm.for_own(half.count, [&](uint64_t p) {
      const uint64_t j = half.first + p;
#pragma unroll 1
      for (int d = 1; d < call.world; ++d) {
        const int owner = call.rank_at(d, call.world);
        if (!norm.has_row(owner, j)) continue;
        copy_results(piece_of(owner, half, p), Row(norm, norm.row(owner, j)));
      }
    });
  };
  stage.prefetch();
  // A block that has failed still runs through all its rows, without waiting: its neighbors in the
  // cluster depend on it.
  run_barriers<true>(session, !staged, norm.rows, norm.shape.rows_per_use,
                     step(stage_inputs, Phase::stage_barrier, staged),
                     step(finish_own, Phase::gather), step(gather));
}

}  // namespace collx::cuda
