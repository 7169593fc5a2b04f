// Reduction and norm of rows that lie here already: what the fallback and a single rank need.
#include "../stages/norm.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    local(const __grid_constant__ GatheredRows gathered,
          const __grid_constant__ NormArguments norm) {
  NormStage<D, false> stage(norm);
  if (norm.shape.steps == 1) stage.prefetch();
  norm.for_own(norm.rows, [&](uint64_t row) {
    const auto fetch = [&](uint32_t step, Share<D>& x) {
      const uint32_t i = stage.index(step);
      if (!stage.has(i)) return;
      Vector v[kMaxCudaRanks];
#pragma unroll
      for (int rank = 0; rank < kMaxCudaRanks; ++rank) {
        if (rank >= gathered.world) continue;
        const char* input = static_cast<const char*>(gathered.input[rank]);
        v[rank] =
            VectorTensor<dtype_size(D)>(input + row * norm.cols * dtype_size(D), norm.cols).load(i);
      }
      fold<D>(x, v, gathered.world, [](float a, float b) { return a + b; });
      stage.accumulate(x, stage.residual(row, i));
    };
    stage.row(fetch, ResultRow<D, false>(norm, row));
  });
}

}  // namespace

Kernel norm_local(const Instance& i) {
  return for_norm_dtype(i.dtype, [&]<DType D>() { return as_kernel(local<D>); });
}

}  // namespace collx::cuda
