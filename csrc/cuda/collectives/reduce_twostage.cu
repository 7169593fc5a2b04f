// Reduce of large tensors, in two stages: every rank sends each rank that is not the root its part,
// 1/(W-1) of the tensor; that rank reduces it and passes the result on to the root.
//
// Costs the tensor once on each link, and two flights. In all-reduce's two-shot slots: every two
// ranks exchange words in both directions in every use, since the root sends in the first stage and
// receives in the second.
#include "../stages/combine.cuh"
#include "../transports/session.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

enum Stage { kScatter, kGather };

template <DType D, int W>
class ReduceTwostage {
  using S = ExchangeSlots<D>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ ReduceTwostage(Session<false>& session, const Routes& routes)
      : session_(session),
        call_(session.call),
        routes_(routes),
        world_(World<W>::size(call_)),
        tiles_(call_) {}

  __device__ void run() {
    uint32_t use = 0, n = 0;
    for (uint64_t done = 0; done < call_.vectors; done += n) {
      const uint64_t left = call_.vectors - done;
      n = left < call_.capacity ? static_cast<uint32_t>(left) : call_.capacity;
      if (use > 0) next_use();
      const auto send = [&](uint32_t i) {
        scatter(data_index<S>(done + i), i, tiles_.epoch(i) + use);
      };
      const auto take = [&](uint32_t i) {
        const uint64_t j = data_index<S>(done + i);
        const uint32_t epoch = tiles_.epoch(i) + use;
        routes_.root == 0 ? gather(j, i, epoch) : reduce(j, i, epoch);
      };
      tiles_.for_own_behind(n, send, take);
      ++use;
    }
    if (routes_.root != 0) copy_own(routes_.kept, routes_.received[0]);
    tiles_.finish(session_, use, n);
  }

 private:
  // j: which vector of a part, if the lane carries one; i: of the use, on the wire.

  /// To each rank but the root, a vector of the part that it reduces.
  __device__ __forceinline__ void scatter(uint64_t j, uint32_t i, uint32_t epoch) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_ && d != routes_.root) v[d] = load(routes_.sent[d], j);
    }
    const uint32_t at = slot_offset<S>(call_, kScatter, epoch, i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world_ || d == routes_.root) continue;
      v[d] = S::sendable(v[d]);
      if (session_.alive()) S::push(call_.outgoing[d] + at, v[d], epoch);
    }
  }

  __device__ __forceinline__ void reduce(uint64_t j, uint32_t i, uint32_t epoch) {
    const Vector own = load(routes_.sent[0], j);
    const Arrivals<kRanks> arrivals(call_, slot_offset<S>(call_, kScatter, epoch, i));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session_, Phase::arrival, world_, epoch, own, arrivals, v);
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source < world_ && source != call_.rank) v[source] = S::received(v[source]);
    }
    const Vector sum = S::sendable(reduce_vectors<D>(v, world_, call_.reduce_op));
    if (!arrived) return;
    S::push(call_.outgoing[routes_.root] + slot_offset<S>(call_, kGather, epoch, i), sum, epoch);
    arrivals.template rearm<S>(world_);
  }

  /// The root: a vector of every part.
  __device__ __forceinline__ void gather(uint64_t j, uint32_t i, uint32_t epoch) {
    const Arrivals<kRanks> arrivals(call_, slot_offset<S>(call_, kGather, epoch, i));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session_, Phase::gather, world_, epoch, Vector{}, arrivals, v);
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source >= world_ || source == call_.rank) continue;
      v[source] = S::received(v[source]);
      if (arrived) store(routes_.received[distance_to(call_, world_, source)], j, v[source]);
    }
    if (arrived) arrivals.template rearm<S>(world_);
  }

  Session<false>& session_;
  const KernelCall& call_;
  const Routes& routes_;
  const int world_;
  Tiles<false> tiles_;
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
