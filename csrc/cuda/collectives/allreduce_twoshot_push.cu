// All-reduce, two-shot, by pushing: every rank scatters its tensor to the owners of its parts; an
// owner polls, reduces, and pushes the result to all; everyone drains.
//
// Costs 2 (W-1)/W of the tensor on each link, and two flights over it.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

enum Stage { kScatter, kGather };

template <DType D, int W, bool Simple>
class Twoshot {
  using S = Slots<D>;
  using Tensor = VectorTensor<dtype_size(D), Simple>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ explicit Twoshot(Session<Simple>& session)
      : session_(session),
        call_(session.call),
        world_(World<W>::size(call_)),
        rank_(call_.rank),
        input_(call_.input, call_.numel),
        output_(call_.output, call_.numel),
        parts_(input_.vectors(), world_),
        tiles_(call_) {}

  __device__ void run() {
    uint32_t use = 0, n = 0;
    for (uint64_t done = 0; Simple || done < call_.vectors; done += n) {
      const uint64_t left = call_.vectors - done;
      n = Simple || left < call_.capacity ? static_cast<uint32_t>(left) : call_.capacity;
      if (!Simple && use > 0) next_use();
      if constexpr (Simple) {
        tiles_.for_own(n, [&](uint32_t i) {
          const uint32_t epoch = tiles_.epoch(i);
          scatter(i, i, epoch);
          reduce(i, i, epoch);
          gather(i, i, epoch);
        });
        use = 1;
        break;
      } else {
        for_own(n, use, [&](uint32_t i, uint32_t epoch) { scatter(done + i, i, epoch); });
        for_own(n, use, [&](uint32_t i, uint32_t epoch) { reduce(done + i, i, epoch); });
        for_own(n, use, [&](uint32_t i, uint32_t epoch) { gather(done + i, i, epoch); });
        ++use;
      }
    }
    tiles_.finish(session_, use, n);
  }

 private:
  template <typename F>
  __device__ __forceinline__ void for_own(uint32_t n, uint32_t use, F f) {
    tiles_.for_own(n, [&](uint32_t i) { f(i, tiles_.epoch(i) + use); });
  }

  __device__ __forceinline__ int peer(int distance) const { return (rank_ + distance) % world_; }

  /// Vector j of the part of `owner`; a filler where that part is shorter than the largest one,
  /// since every use of a tile must carry a word between every two ranks.
  __device__ __forceinline__ Vector load(int owner, uint64_t j) const {
    if constexpr (Simple) return input_.load(owner * call_.vectors + j);
    const Part part = parts_.part(owner);
    return j < part.count ? input_.load(part.start + j) : Vector{};
  }
  __device__ __forceinline__ void store(int owner, uint64_t j, Vector v) const {
    if constexpr (Simple) return output_.store(owner * call_.vectors + j, v);
    const Part part = parts_.part(owner);
    if (j < part.count) output_.store(part.start + j, v);
  }

  __device__ __forceinline__ void scatter(uint64_t j, uint32_t i, uint32_t epoch) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) v[d] = load(peer(d), j);
    }
    if (!session_.alive()) return;
    const uint32_t at = slot_offset<S>(call_, kScatter, epoch, i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(call_.outgoing[d] + at, S::sendable(v[d]), epoch);
    }
  }

  __device__ __forceinline__ void reduce(uint64_t j, uint32_t i, uint32_t epoch) {
    const Arrivals<kRanks> arrivals(call_, slot_offset<S>(call_, kScatter, epoch, i));
    Vector v[kRanks];
    const Vector own = S::sendable(load(rank_, j));
    if (!await_vectors<S>(session_, Phase::arrival, world_, epoch, own, arrivals, v)) return;
    const Vector sum = reduce_vectors<D>(v, world_, Simple ? ReduceOp::sum : call_.reduce_op);
    const Vector sent = S::sendable(sum);
    const uint32_t at = slot_offset<S>(call_, kGather, epoch, i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(call_.outgoing[d] + at, sent, epoch);
    }
    store(rank_, j, sum);
    arrivals.template rearm<S>(world_);
  }

  __device__ __forceinline__ void gather(uint64_t j, uint32_t i, uint32_t epoch) {
    const Arrivals<kRanks> arrivals(call_, slot_offset<S>(call_, kGather, epoch, i));
    Vector v[kRanks];
    if (!await_vectors<S>(session_, Phase::gather, world_, epoch, Vector{}, arrivals, v)) return;
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner < world_ && owner != rank_) store(owner, j, v[owner]);
    }
    arrivals.template rearm<S>(world_);
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const int world_, rank_;
  const Tensor input_, output_;
  const Partition parts_;
  Tiles<Simple> tiles_;
};

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twoshot_push(const __grid_constant__ KernelCall call) {
  Session<Simple> session(call);
  Twoshot<D, W, Simple>(session).run();
}

}  // namespace

Kernel allreduce_twoshot_push(const Instance& i) {
  return for_all(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(twoshot_push<D, W, Simple>); });
}

}  // namespace collx::cuda
