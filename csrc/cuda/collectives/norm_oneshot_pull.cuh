// All-reduce and norm, one-shot, by pulling: every rank reads all inputs and processes all rows.
// Symmetric inputs are read directly. Other inputs are staged first.
//
// Cost: W-1 times the tensor on each link, and a barrier for each chunk.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/result_row.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Results, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, kRowBlocksHeld)
    norm_oneshot_pull_kernel(const __grid_constant__ KernelCall call,
                             const __grid_constant__ NormArguments norm,
                             const __grid_constant__ PullArguments pull,
                             const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Results::kDType;
  Session<BlockBarrier> session(call);
  NormStage<Results, false> stage(norm, epilogue...);
  const uint32_t i = stage.index();
  const bool staged = pull.input[0] == nullptr;
  const auto staging = [&](int rank, const Half& half, uint64_t p) {
    return pull.staged(call, rank, half.parity) + p * norm.vectors + i;
  };

  const auto stage_inputs = [&](const Half& half) {
    norm.for_own(half.count, [&](uint64_t p) {
      const auto row = matrix_row<D>(norm, call.input, half.first + p);
      if (stage.has(i)) *staging(call.rank, half, p) = row.load(i);
    });
  };
  const auto finish = [&](const Half& half) {
    norm.for_own(half.count, [&](uint64_t p) {
      const uint64_t row = half.first + p;
      const auto fetch = [&](uint32_t, RowValues<D>& x) {
        if (!stage.has(i) || !session.alive()) return;
        const auto inputs = from_memory<kMaxCudaRanks>(call.world, [&](int rank) {
          if (rank == call.rank) return matrix_row<D>(norm, call.input, row).load(i);
          return staged ? ptx::ld_relaxed_sys(staging(rank, half, p))
                        : matrix_row<D>(norm, pull.input[rank], row).load_peer(i);
        });
        stage.sum(x, call.world, inputs, stage.residual(row, i));
      };
      stage.row(fetch, ResultRow<D, false>(norm, row));
    });
  };
  stage.prefetch();
  // A block that has failed still runs through all its rows, without waiting: its neighbors in the
  // cluster depend on it.
  run_barriers<true>(session, !staged, norm.rows, norm.shape.rows_per_use,
                     step(stage_inputs, Phase::stage_barrier, staged), step(finish));
}

}  // namespace collx::cuda
