// Reduction and norm of rows that lie here already: what the fallback and a single rank need.
#include "../stages/norm.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D>
__global__ void __launch_bounds__(512, 2) local(const __grid_constant__ GatheredRows gathered,
                                                const __grid_constant__ NormArguments norm) {
  NormStage<D, false> stage(norm);
  if (norm.shape.steps == 1) stage.prefetch();
  for (uint64_t row = norm.cluster(); row < norm.rows; row += norm.clusters()) {
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
  }
}

struct Family {
  template <DType D>
  Kernel operator()() const {
    return reinterpret_cast<Kernel>(local<D>);
  }
};

}  // namespace

Kernel norm_local(DType dtype) { return find_norm_dtype(dtype, Family{}); }

}  // namespace collx::cuda
