// All-reduce, two-shot, by pushing: every rank scatters its tensor to the owners of its parts; an
// owner polls, reduces, and pushes the result to all; everyone drains.
//
// Costs 2 (W-1)/W of the tensor on each link, and two flights over it.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

enum Stage { kScatter, kGather };

template <DType D, int W>
class Twoshot {
  using S = Slots<D>;
  using Tensor = VectorTensor<dtype_size(D)>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ Twoshot(Session& session, const SlotArea& area)
      : session_(session),
        view_(session.view),
        area_(area),
        world_(World<W>::size(view_)),
        rank_(view_.rank),
        input_(session.call.input, session.call.numel),
        output_(session.call.output, session.call.numel),
        tiles_(session, area, largest_part(input_.vectors(), world_)) {}

  __device__ void run() {
    const uint64_t part = largest_part(input_.vectors(), world_);
    uint32_t use = 0;
    for (uint64_t done = 0; done < part; done += tiles_.capacity(), ++use) {
      const uint64_t left = part - done;
      const uint32_t n = left < tiles_.capacity() ? static_cast<uint32_t>(left) : tiles_.capacity();
      // In a later use of the same tiles: re-arming comes before the words that let peers go on.
      if (use > 0) next_use();
      for_own(n, use, [&](uint32_t i, uint32_t epoch) { scatter(done + i, i, epoch); });
      for_own(n, use, [&](uint32_t i, uint32_t epoch) { reduce(done + i, i, epoch); });
      for_own(n, use, [&](uint32_t i, uint32_t epoch) { gather(done + i, i, epoch); });
    }
    tiles_.finish(session_);
  }

 private:
  template <typename F>
  __device__ __forceinline__ void for_own(uint32_t n, uint32_t use, F f) {
    for (uint32_t i = tiles_.first(); i < n; i += tiles_.stride()) {
      f(i, tiles_.epoch(i) + use);
    }
  }

  __device__ __forceinline__ int hop(int distance) const { return (rank_ + distance) % world_; }

  __device__ __forceinline__ char* slot(int at, Stage stage, uint32_t epoch, int source,
                                        uint32_t i) const {
    return view_.region[at] + area_.slot(world_, stage, epoch & 1, source) +
           uint64_t{i} * S::kWireBytes;
  }

  /// Vector j of the part of `owner`; a filler where that part is shorter than the largest one,
  /// since every use of a tile must carry a word between every two ranks.
  __device__ __forceinline__ Vector load(int owner, uint64_t j) const {
    const Part part = partition(input_.vectors(), world_, owner);
    return j < part.count ? S::sendable(input_.load(part.start + j)) : Vector{};
  }
  __device__ __forceinline__ void store(int owner, uint64_t j, Vector v) const {
    const Part part = partition(input_.vectors(), world_, owner);
    if (j < part.count) output_.store(part.start + j, v);
  }

  __device__ __forceinline__ void scatter(uint64_t j, uint32_t i, uint32_t epoch) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) v[d] = load(hop(d), j);
    }
    if (!session_.alive()) return;
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(slot(hop(d), kScatter, epoch, rank_, i), v[d], epoch);
    }
  }

  __device__ __forceinline__ void reduce(uint64_t j, uint32_t i, uint32_t epoch) {
    Vector v[kRanks];
    const Vector own = load(rank_, j);
    if (!arrived(v, own, kScatter, Phase::arrival, i, epoch)) return;
    const Vector sum = reduce_vectors<D>(v, world_, session_.call.reduce_op);
    const Vector sent = S::sendable(sum);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(slot(hop(d), kGather, epoch, rank_, i), sent, epoch);
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
    return await_vectors<S>(
        session_, phase, world_, epoch, own,
        [&](int source) { return slot(rank_, stage, epoch, source, i); }, v);
  }

  __device__ __forceinline__ void rearm(Stage stage, uint32_t i, uint32_t epoch) {
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source < world_ && source != rank_) S::rearm(slot(rank_, stage, epoch, source, i));
    }
  }

  Session& session_;
  const RankView& view_;
  const SlotArea& area_;
  const int world_, rank_;
  const Tensor input_, output_;
  Tiles tiles_;
};

template <DType D, int W>
__global__ void __launch_bounds__(512, 2)
    twoshot_push(const __grid_constant__ RankView view, const __grid_constant__ KernelCall call) {
  Session session(view, call);
  Twoshot<D, W>(session, Slots<D>::twoshot(view.layout)).run();
  session.finish();
}

struct Family {
  template <DType D, int W>
  static Kernel kernel() {
    return twoshot_push<D, W>;
  }
};

}  // namespace

Kernel allreduce_twoshot_push(DType dtype, int world) { return find_kernel<Family>(dtype, world); }

}  // namespace collx::cuda
