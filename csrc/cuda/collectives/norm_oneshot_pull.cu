// All-reduce and norm, one-shot, by pulling: every rank reads all inputs and does all the rows.
// Symmetric inputs are read where they are; others are staged first.
//
// Costs W-1 times the tensor on each link, and a barrier a chunk.
#include "../stages/norm.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D>
class NormOneshotPull {
  using Row = VectorTensor<dtype_size(D)>;

 public:
  __device__ NormOneshotPull(Session<false>& session, const NormArguments& norm,
                             const PullArguments& pull)
      : call_(session.call), norm_(norm), pull_(pull), session_(session), stage_(norm) {}

  __device__ void run() {
    const bool staged = pull_.input[0] == nullptr;
    stage_.prefetch();
    // A block that has given up goes on through all its rows, without waiting: its neighbors in the
    // cluster still count on it.
    run_barriers<true>(
        session_, !staged, norm_.rows, norm_.shape.rows_per_use,
        step([this](const Half& half) { stage(half); }, Phase::stage_barrier, staged),
        step([=, this](const Half& half) { finish(half, staged); }));
  }

 private:
  __device__ __forceinline__ Row input_of(const void* input, uint64_t row) const {
    return {static_cast<const char*>(input) + row * norm_.cols * dtype_size(D), norm_.cols};
  }
  __device__ __forceinline__ Vector* staging(int rank, const Half& half, uint64_t p,
                                             uint32_t i) const {
    return pull_.staged(call_, rank, half.parity) + p * norm_.vectors + i;
  }

  __device__ __forceinline__ void stage(const Half& half) const {
    const uint32_t i = stage_.index();
    norm_.for_own(half.count, [&](uint64_t p) {
      if (stage_.has(i)) {
        *staging(call_.rank, half, p, i) = input_of(call_.input, half.first + p).load(i);
      }
    });
  }

  __device__ __forceinline__ void finish(const Half& half, bool staged) {
    norm_.for_own(half.count, [&](uint64_t p) {
      const auto fetch = [&](uint32_t, Share<D>& x) { reduce(half, p, staged, x); };
      stage_.row(fetch, ResultRow<D, false>(norm_, half.first + p));
    });
  }

  __device__ __forceinline__ void reduce(const Half& half, uint64_t p, bool staged, Share<D>& x) {
    const uint32_t i = stage_.index();
    const uint64_t row = half.first + p;
    if (!stage_.has(i) || !session_.alive()) return;
    Vector v[kMaxCudaRanks];
#pragma unroll
    for (int rank = 0; rank < kMaxCudaRanks; ++rank) {
      if (rank >= call_.world) continue;
      if (rank == call_.rank) {
        v[rank] = input_of(call_.input, row).load(i);
      } else {
        v[rank] = staged ? ptx::ld_relaxed_sys(staging(rank, half, p, i))
                         : input_of(pull_.input[rank], row).load_peer(i);
      }
    }
    fold<D>(x, v, call_.world, [](float a, float b) { return a + b; });
    stage_.accumulate(x, stage_.residual(row, i));
  }

  const KernelCall& call_;
  const NormArguments& norm_;
  const PullArguments& pull_;
  Session<false>& session_;
  NormStage<D, false> stage_;
};

template <DType D>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    oneshot_pull(const __grid_constant__ KernelCall call,
                 const __grid_constant__ NormArguments norm,
                 const __grid_constant__ PullArguments pull) {
  Session<false> session(call);
  NormOneshotPull<D>(session, norm, pull).run();
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all worlds.
Kernel norm_oneshot_pull(const Instance& i) {
  return for_norm_dtype(i.dtype, [&]<DType D>() { return as_kernel(oneshot_pull<D>); });
}

}  // namespace collx::cuda
