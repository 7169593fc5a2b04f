// All-reduce and norm, one-shot, by pulling: every rank reads all inputs and does all the rows.
// Symmetric inputs are read where they are; others are staged first.
//
// Costs W-1 times the tensor on each link, and a barrier a chunk.
#include "../stages/norm.cuh"
#include "../transports/barrier.cuh"
#include "../transports/session.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D>
class NormOneshotPull {
  using Row = VectorTensor<dtype_size(D)>;

 public:
  __device__ NormOneshotPull(Session<false>& session, const NormArguments& norm,
                             const PullArguments& pull)
      : call_(session.call),
        norm_(norm),
        pull_(pull),
        session_(session),
        barrier_(call_, session.patience),
        stage_(norm) {}

  // A block that has given up goes on through all its rows, without waiting: its neighbors in the
  // cluster still count on it.
  __device__ void run() {
    const bool staged = pull_.input[0] == nullptr;
    const uint64_t most = norm_.shape.rows_per_use;
    stage_.prefetch();
    if (!staged) barrier_.sync(Phase::start_barrier);
    // The halves take turns: one is written again only after the next barrier, when all peers have
    // read it.
    for (uint64_t done = 0; done < norm_.rows; done += most, half_ ^= 1) {
      const uint64_t n = norm_.rows - done < most ? norm_.rows - done : most;
      if (staged) {
        for_own(n, [&](uint64_t p) { stage(p, done + p); });
        barrier_.sync(Phase::stage_barrier);
      }
      for_own(n, [&](uint64_t p) {
        const auto fetch = [&](uint32_t, Share<D>& x) { reduce(p, done + p, staged, x); };
        stage_.row(fetch, ResultRow<D, false>(norm_, done + p));
      });
    }
    barrier_.sync(Phase::end_barrier);
    barrier_.finish();
  }

 private:
  template <typename F>
  __device__ __forceinline__ void for_own(uint64_t n, F f) {
    for (uint64_t p = norm_.cluster(); p < n; p += norm_.clusters()) f(p);
  }

  __device__ __forceinline__ Row input_of(const void* input, uint64_t row) const {
    return {static_cast<const char*>(input) + row * norm_.cols * dtype_size(D), norm_.cols};
  }
  __device__ __forceinline__ Vector* staging(int rank, uint64_t p, uint32_t i) const {
    return reinterpret_cast<Vector*>(pull_.region[rank] + pull_.staging +
                                     half_ * pull_.staging_bytes) +
           p * norm_.vectors + i;
  }

  __device__ __forceinline__ void stage(uint64_t p, uint64_t row) const {
    const uint32_t i = stage_.index();
    if (stage_.has(i)) *staging(call_.rank, p, i) = input_of(call_.input, row).load(i);
  }

  __device__ __forceinline__ void reduce(uint64_t p, uint64_t row, bool staged, Share<D>& x) {
    const uint32_t i = stage_.index();
    if (!stage_.has(i) || !session_.alive()) return;
    Vector v[kMaxCudaRanks];
#pragma unroll
    for (int rank = 0; rank < kMaxCudaRanks; ++rank) {
      if (rank >= call_.world) continue;
      if (rank == call_.rank) {
        v[rank] = input_of(call_.input, row).load(i);
      } else {
        v[rank] = staged ? ptx::ld_relaxed_sys(staging(rank, p, i))
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
  BlockBarrier barrier_;
  NormStage<D, false> stage_;
  uint32_t half_ = 0;
};

template <DType D>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    oneshot_pull(const __grid_constant__ KernelCall call,
                 const __grid_constant__ NormArguments norm,
                 const __grid_constant__ PullArguments pull) {
  Session<false> session(call);
  NormOneshotPull<D>(session, norm, pull).run();
  session.finish();
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all worlds.
Kernel norm_oneshot_pull(const Instance& i) {
  return for_norm_dtype(i.dtype, [&]<DType D>() { return as_kernel(oneshot_pull<D>); });
}

}  // namespace collx::cuda
