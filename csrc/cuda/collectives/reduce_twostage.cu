// Reduce of large tensors, in two stages: every rank sends each rank that is not the root its part,
// 1/(W-1) of the tensor; that rank reduces it and passes the result on to the root.
//
// Costs the tensor once on each link, and two flights. In all-reduce's two-shot slots: every two
// ranks exchange words in both directions in every use, since the root sends in the first stage and
// receives in the second.
#include "../stages/combine.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

enum Stage { kScatter, kGather };

template <DType D, int W>
class ReduceTwostage {
  using S = Slots<D>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ ReduceTwostage(Session<false>& session, const Routes& routes)
      : session_(session), call_(session.call), routes_(routes), world_(World<W>::size(call_)) {}

  __device__ void run() {
    const auto keep = [this] {
      if (routes_.root != 0) copy_own(routes_.kept, routes_.to[0]);
    };
    run_slots<Order::behind>(
        session_, keep, [this](const Place& at) { scatter(at); },
        [this](const Place& at) { routes_.root == 0 ? gather(at) : reduce(at); });
  }

 private:
  /// To each rank but the root, a vector of the part that it reduces.
  __device__ __forceinline__ void scatter(const Place& at) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_ && d != routes_.root) v[d] = load(routes_.from[d], data_index<S>(at.vector));
    }
    const uint32_t offset = slot_offset(call_, kScatter, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world_ || d == routes_.root) continue;
      v[d] = S::sendable(v[d]);
      if (session_.alive()) S::push(call_.outgoing[d] + offset, v[d]);
    }
  }

  __device__ __forceinline__ void reduce(const Place& at) {
    const Vector own = load(routes_.from[0], data_index<S>(at.vector));
    const Arrivals<kRanks> arrivals(call_, slot_offset(call_, kScatter, at.epoch, at.i));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session_, Phase::arrival, world_, at.epoch, own, arrivals, v);
    unmask<S>(call_, world_, v);
    const Vector sum = S::sendable(reduce_vectors<D>(v, world_, call_.reduce_op));
    if (!arrived) return;
    S::push(call_.outgoing[routes_.root] + slot_offset(call_, kGather, at.epoch, at.i), sum);
    arrivals.template rearm<S>(world_);
  }

  /// The root: a vector of every part.
  __device__ __forceinline__ void gather(const Place& at) {
    const Arrivals<kRanks> arrivals(call_, slot_offset(call_, kGather, at.epoch, at.i));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session_, Phase::gather, world_, at.epoch, Vector{}, arrivals, v);
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source >= world_ || source == call_.rank) continue;
      v[source] = S::received(v[source]);
      if (arrived)
        store(routes_.to[distance_to(call_, world_, source)], data_index<S>(at.vector), v[source]);
    }
    if (arrived) arrivals.template rearm<S>(world_);
  }

  Session<false>& session_;
  const KernelCall& call_;
  const Routes& routes_;
  const int world_;
};

template <DType D, int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twostage(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  Session<false> session(call);
  ReduceTwostage<D, W>(session, routes).run();
}

}  // namespace

Kernel reduce_twostage(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(twostage<D, W>); });
}

}  // namespace collx::cuda
