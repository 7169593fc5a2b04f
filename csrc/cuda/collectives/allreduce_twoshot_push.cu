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
        tiles_(call_, parts_.largest()) {}

  __device__ void run() {
    const uint64_t part = parts_.largest();
    uint32_t use = 0, n = 0;
    for (uint64_t done = 0; done < part; done += n) {
      const uint64_t left = part - done;
      n = left < tiles_.capacity() ? static_cast<uint32_t>(left) : tiles_.capacity();
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

  /// Where the vector i of `source` arrives in the region that starts at `region`.
  __device__ __forceinline__ char* slot(char* region, Stage stage, uint32_t epoch, int source,
                                        uint32_t i) const {
    return region + call_.area.slot(world_, stage, epoch & 1, source) + uint64_t{i} * S::kWireBytes;
  }

  /// Vector j of the part of `owner`; a filler where that part is shorter than the largest one,
  /// since every use of a tile must carry a word between every two ranks.
  __device__ __forceinline__ Vector load(int owner, uint64_t j) const {
    const Part part = parts_.part(owner);
    return j < part.count ? input_.load(part.start + j) : Vector{};
  }
  __device__ __forceinline__ void store(int owner, uint64_t j, Vector v) const {
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
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_)
        S::push(slot(call_.peer[d], kScatter, epoch, rank_, i), S::sendable(v[d]), epoch);
    }
  }

  __device__ __forceinline__ void reduce(uint64_t j, uint32_t i, uint32_t epoch) {
    Vector v[kRanks];
    const Vector own = S::sendable(load(rank_, j));
    if (!arrived(v, own, kScatter, Phase::arrival, i, epoch)) return;
    const Vector sum = reduce_vectors<D>(v, world_, Simple ? ReduceOp::sum : call_.reduce_op);
    const Vector sent = S::sendable(sum);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(slot(call_.peer[d], kGather, epoch, rank_, i), sent, epoch);
    }
    store(rank_, j, sum);
    rearm(kScatter, i, epoch);
  }

  __device__ __forceinline__ void gather(uint64_t j, uint32_t i, uint32_t epoch) {
    Vector v[kRanks];
    if (!arrived(v, Vector{}, kGather, Phase::gather, i, epoch)) return;
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner < world_ && owner != rank_) store(owner, j, v[owner]);
    }
    rearm(kGather, i, epoch);
  }

  __device__ __forceinline__ bool arrived(Vector (&v)[kRanks], const Vector& own, Stage stage,
                                          Phase phase, uint32_t i, uint32_t epoch) {
    char* const slots = slot(call_.own(), stage, epoch, 0, i);
    return await_vectors<S>(session_, phase, world_, epoch, own, slots, v);
  }

  __device__ __forceinline__ void rearm(Stage stage, uint32_t i, uint32_t epoch) {
    cuda::rearm<S, kRanks>(call_, world_, slot(call_.own(), stage, epoch, 0, i));
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const int world_, rank_;
  const Tensor input_, output_;
  const Partition parts_;
  Tiles<Simple> tiles_;
};

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(512, 2) twoshot_push(const __grid_constant__ KernelCall call) {
  Session<Simple> session(call);
  Twoshot<D, W, Simple>(session).run();
}

template <bool Simple>
struct Family {
  template <DType D, int W>
  static Kernel kernel() {
    return reinterpret_cast<Kernel>(twoshot_push<D, W, Simple>);
  }
};

}  // namespace

Kernel allreduce_twoshot_push(DType dtype, int world, bool simple) {
  return simple ? find_kernel<Family<true>>(dtype, world)
                : find_kernel<Family<false>>(dtype, world);
}

}  // namespace collx::cuda
