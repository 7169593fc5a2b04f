// Reduction and norm of rows that are already on this rank, for the fallback and for a single rank.
#pragma once

#include "../stages/norm.cuh"
#include "../transports/result_row.cuh"
#include "../transports/sources.cuh"

namespace collx::cuda {

template <typename Results, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, kRowBlocksHeld)
    norm_local_kernel(const __grid_constant__ GatheredRows gathered,
                      const __grid_constant__ NormArguments norm,
                      const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Results::kDType;
  NormStage<Results, false> stage(norm, epilogue...);
  stage.prefetch();
  norm.for_own(norm.rows, [&](uint64_t row) {
    const auto fetch = [&](uint32_t step, RowValues<D>& x) {
      const uint32_t i = stage.index(step);
      if (!stage.has(i)) return;
      const auto inputs = from_memory<kMaxCudaRanks>(gathered.world, [&](int rank) {
        return matrix_row<D>(norm, gathered.input[rank], row).load(i);
      });
      stage.sum(x, gathered.world, inputs, stage.residual(row, i));
    };
    stage.row(fetch, ResultRow<D, false>(norm, row));
  });
}

}  // namespace collx::cuda
