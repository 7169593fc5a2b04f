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
        parts_(input_.vectors(), world_) {}

  __device__ void run() {
    run_slots<Order::phases>(
        session_, [] {}, [this](const Place& at) { scatter(at); },
        [this](const Place& at) { reduce(at); }, [this](const Place& at) { gather(at); });
  }

 private:
  __device__ __forceinline__ int peer(int distance) const { return (rank_ + distance) % world_; }

  /// Of the part of `owner`; a filler where that part is shorter than the largest one, since every
  /// use of a tile must carry a word between every two ranks, and for a thread that has a mask.
  __device__ __forceinline__ Vector load(int owner, const Place& at) const {
    if constexpr (Simple && !S::kMasked) return input_.load(owner * call_.vectors + at.vector);
    const uint64_t j = data_index<S>(at.vector);
    const Part part = parts_.part(owner);
    return j < part.count ? input_.load(part.start + j) : Vector{};
  }
  __device__ __forceinline__ void store(int owner, const Place& at, Vector v) const {
    if constexpr (Simple && !S::kMasked) {
      return output_.store(owner * call_.vectors + at.vector, v);
    }
    const uint64_t j = data_index<S>(at.vector);
    const Part part = parts_.part(owner);
    if (j < part.count) output_.store(part.start + j, v);
  }

  __device__ __forceinline__ void scatter(const Place& at) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) v[d] = load(peer(d), at);
    }
    const uint32_t offset = slot_offset(call_, kScatter, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world_) continue;
      v[d] = S::sendable(v[d]);
      if (session_.alive()) S::push(call_.outgoing[d] + offset, v[d]);
    }
  }

  __device__ __forceinline__ void reduce(const Place& at) {
    const Arrivals<kRanks> arrivals(call_, slot_offset(call_, kScatter, at.epoch, at.i));
    const Vector own = S::own(load(rank_, at));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session_, Phase::arrival, world_, at.epoch, own, arrivals, v);
    unmask<S>(call_, world_, v);
    const Vector sum = reduce_vectors<D>(v, world_, Simple ? ReduceOp::sum : call_.reduce_op);
    const Vector sent = S::sendable(sum);
    if (!arrived) return;
    const uint32_t offset = slot_offset(call_, kGather, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(call_.outgoing[d] + offset, sent);
    }
    store(rank_, at, sum);
    arrivals.template rearm<S>(world_);
  }

  __device__ __forceinline__ void gather(const Place& at) {
    const Arrivals<kRanks> arrivals(call_, slot_offset(call_, kGather, at.epoch, at.i));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session_, Phase::gather, world_, at.epoch, Vector{}, arrivals, v);
    unmask<S>(call_, world_, v);
    if (!arrived) return;
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner < world_ && owner != rank_) store(owner, at, v[owner]);
    }
    arrivals.template rearm<S>(world_);
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const int world_, rank_;
  const Tensor input_, output_;
  const Partition parts_;
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
