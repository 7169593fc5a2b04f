// All-reduce and norm, one-shot, by pushing: every rank stores its rows into its slots at every
// peer, polls its own slots, and reduces, normalizes and quantizes every row, all in registers.
// Where rows are scattered, a rank gets those of its part alone.
//
// Costs W-1 times the tensor on each link (scattered: its other parts), and one flight over it.
#include "../stages/norm.cuh"
#include "../transports/pieces.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W, bool Simple>
class NormOneshot {
  using S = SentinelSlots<D>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ NormOneshot(Session<Simple>& session, const NormArguments& norm,
                         NormStage<D, Simple>& stage)
      : session_(session),
        call_(session.call),
        norm_(norm),
        world_(World<W>::size(call_)),
        stage_(stage),
        pieces_(call_, norm) {}

  __device__ void run() {
    const bool whole = Simple || norm_.shape.steps == 1;  // rows, in one step
    run_rows(
        session_, pieces_, norm_,
        [&] {
          if (whole) stage_.prefetch();
        },
        [&](uint32_t p, uint64_t j) {
          if (whole) push(0, p, j);
        },
        [&](uint32_t p, uint64_t j) { finish(p, j); });
  }

 private:
  __device__ __forceinline__ bool scatters() const { return !Simple && norm_.scatters; }
  __device__ __forceinline__ bool exists(uint64_t j) const {
    return !scatters() || j < norm_.parts.part(call_.rank).count;
  }

  /// Row j of the results. Rows of several steps come one at a time, each step in a use of its own.
  __device__ __forceinline__ void finish(uint32_t p, uint64_t j) {
    const auto fetch = [&](uint32_t step, Share<D>& x) {
      if (!Simple && norm_.shape.steps > 1) {
        if (step > 0) pieces_.next();
        push(step, p, j);
      }
      receive(step, p, j, x);
    };
    if (exists(j)) {
      stage_.row(fetch, ResultRow<D, Simple>(norm_, j));
    } else {
      Share<D> none;
      for (uint32_t step = 0; step < norm_.shape.steps; ++step) fetch(step, none);
    }
  }

  /// Vector i of row j for a rank: of all, or of its part. A filler where that part is shorter than
  /// the largest, since every use of a tile carries a word between every two ranks.
  __device__ __forceinline__ Vector load(int rank, uint64_t j, uint32_t i) const {
    if (scatters()) {
      const Part part = norm_.parts.part(rank);
      if (j >= part.count) return {};
      j += part.start;
    }
    const char* input = static_cast<const char*>(call_.input);
    return VectorTensor<dtype_size(D), Simple>(input + j * norm_.cols * dtype_size(D), norm_.cols)
        .load(i);
  }

  __device__ __forceinline__ PieceSlot slot(uint32_t p) const {
    return pieces_.slot(0, p, threadIdx.x * kVectorBytes);
  }

  __device__ __forceinline__ void push(uint32_t step, uint32_t p, uint64_t j) const {
    const uint32_t i = stage_.index(step);
    if (!stage_.has(i)) return;
    // Epoch, data and the poison word are in flight together.
    const PieceSlot to = slot(p);
    Vector v = load(call_.rank, j, i);
    if (!session_.alive()) return;
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world_) continue;
      if (scatters()) v = load((call_.rank + d) % world_, j, i);
      S::push(call_.outgoing[d] + to.offset, S::sendable(v));
    }
  }

  __device__ __forceinline__ void receive(uint32_t step, uint32_t p, uint64_t j, Share<D>& x) {
    const uint32_t i = stage_.index(step);
    if (!stage_.has(i)) return;
    const PieceSlot from = slot(p);
    const Vector own = S::sendable(load(call_.rank, j, i));
    const Vector residual = exists(j) ? stage_.residual(j, i) : Vector{};
    const Arrivals<kRanks> arrivals(call_, from.offset);
    Vector v[kRanks];
    if (!await_vectors<S>(session_, Phase::arrival, world_, from.epoch, own, arrivals, v)) return;
    arrivals.template rearm<S>(world_);
    fold<D>(x, v, world_, [](float a, float b) { return a + b; });
    stage_.accumulate(x, residual);
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const NormArguments& norm_;
  const int world_;
  NormStage<D, Simple>& stage_;
  Pieces pieces_;
};

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    oneshot_push(const __grid_constant__ KernelCall call,
                 const __grid_constant__ NormArguments norm) {
  call.touch();
  NormStage<D, Simple> stage(norm);
  Session<Simple> session(call);
  NormOneshot<D, W, Simple>(session, norm, stage).run();
}

}  // namespace

Kernel norm_oneshot_push(const Instance& i) {
  return for_norm(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(oneshot_push<D, W, Simple>); });
}

}  // namespace collx::cuda
