// All-reduce and norm, two-shot, by multicast: every rank loads the sums of its part of the rows,
// rounded to the dtype, and stores them to all ranks. Each rank finishes all rows from these sums.
// Symmetric inputs are read directly. Other inputs are staged first. Sums go into the staging
// memory, to the place where the inputs that they are computed from are or would be staged.
//
// Cost: the tensor once on each link in each direction, and a barrier for each step of each chunk.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/multicast.cuh"
#include "../transports/result_row.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Results, typename M, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, kRowBlocksHeld)
    norm_multimem_twoshot_kernel(const __grid_constant__ KernelCall call,
                                 const __grid_constant__ NormArguments norm,
                                 const __grid_constant__ PullArguments pull,
                                 const __grid_constant__ MulticastArguments multicast,
                                 const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Results::kDType;
  Session<MulticastBarrier<M>> session(call, multicast);
  NormStage<Results, false> stage(norm, epilogue...);
  const uint32_t i = stage.index();
  const bool staged = multicast.input == nullptr;
  // The index of this thread's vector of the row at position p for `owner`, in a half of the
  // staging memory.
  const auto place = [&](int owner, uint64_t p) {
    return (static_cast<uint32_t>(owner) * uint64_t{norm.shape.rows_per_use} + p) * norm.vectors +
           i;
  };
  // Calls f(owner, row, place) for the rows of all parts.
  const auto for_parts = [&](const Half& half, auto f) {
    norm.for_own(half.count, [&](uint64_t p) {
#pragma unroll 1
      for (int owner = 0; owner < call.world; ++owner) {
        if (!norm.has_row(owner, half.first + p)) continue;
        f(owner, norm.row(owner, half.first + p), place(owner, p));
      }
    });
  };

  const auto stage_inputs = [&](const Half& half) {
    if (!stage.has(i)) return;
    Vector* to = pull.staged(call, call.rank, half.parity);
    for_parts(half, [&](int, uint64_t row, uint64_t at) {
      to[at] = matrix_row<D>(norm, call.input, row).load(i);
    });
  };
  const auto sum_own = [&](const Half& half) {
    if (!stage.has(i) || !session.alive()) return;
    const auto region = staging_of_all<M, D>(call, pull, multicast, half.parity);
    norm.for_own(half.count, [&](uint64_t p) {
      if (!norm.has_row(call.rank, half.first + p)) return;
      const uint64_t at = place(call.rank, p);
      const uint64_t bytes = norm.row(call.rank, half.first + p) * norm.cols * dtype_size(D);
      const EveryTensor<M, D> inputs({call, multicast.input + bytes, pull.input, bytes}, norm.cols);
      region.store(at, staged ? region.sum(at) : inputs.sum(i));
    });
  };
  const auto finish = [&](const Half& half) {
    const Vector* from = pull.staged(call, call.rank, half.parity);
    for_parts(half, [&](int, uint64_t row, uint64_t at) {
      const auto fetch = [&](uint32_t, RowValues<D>& x) {
        if (!stage.has(i) || !session.alive()) return;
        unpack<D>(ptx::ld_relaxed_sys(from + at), x);
        stage.accumulate(x, stage.residual(row, i));
      };
      stage.row(fetch, ResultRow<D, false>(norm, row));
    });
  };
  stage.prefetch();
  // A block that has failed still runs through all its rows, without waiting: its neighbors in the
  // cluster depend on it.
  run_barriers<true>(session, !staged, norm.rows, norm.shape.rows_per_use,
                     step(stage_inputs, Phase::stage_barrier, staged), step(sum_own, Phase::gather),
                     step(finish));
}

}  // namespace collx::cuda
