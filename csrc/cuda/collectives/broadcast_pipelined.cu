// Broadcast in a pipeline: the root sends each other rank a slice of its own, 1/(W-1) of the tensor;
// that rank forwards every word, as it arrives, to the ranks that are not the root.
//
// Costs the tensor once on the root's link, and two flights. Through channels: a forwarder waits for
// the done words of those to whom it forwards, as any sender does.
#include "../stages/messages.cuh"
#include "../transports/channels.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

using S = MaskedSlots;

template <int W>
class Pipeline {
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ Pipeline(Session<false>& session, const Routes& routes)
      : session_(session),
        call_(session.call),
        routes_(routes),
        world_(World<W>::size(call_)),
        root_((call_.rank + routes.root) % world_),
        channels_(call_, routes, call_.vectors) {}

  __device__ void run() {
    for (uint32_t use = 0; uint64_t{use} * call_.capacity < call_.vectors; ++use) {
      if (routes_.root == 0) {
        channels_.for_own([&](uint32_t i) { send(use, i); });
      } else {
        channels_.for_own([&](uint32_t i) { forward(use, i); });
        channels_.for_own([&](uint32_t i) { take_forwarded(use, i); });
      }
      channels_.finish_use(session_, use);
    }
    copy_own(routes_.sent[0], routes_.received[0]);
    channels_.finish(session_);
  }

 private:
  __device__ __forceinline__ uint64_t index(uint32_t use, uint32_t i) const {
    return data_index<S>(uint64_t{use} * call_.capacity + i);
  }
  __device__ __forceinline__ int rank_at(int distance) const {
    return (call_.rank + distance) % world_;
  }

  /// To a rank, over its channel, when that is free.
  __device__ __forceinline__ void push(int d, uint32_t use, uint32_t i, Vector wire) {
    const int peer = rank_at(d);
    const uint32_t epoch = channels_.sent(i)[peer] + use + 1;
    const uint32_t done = ptx::ld_acquire_sys(channels_.done(i) + peer);
    if (!channels_.writable(session_, peer, i, epoch, done)) return;
    S::push(call_.outgoing[d] + slot_offset<S>(call_, 0, epoch, i), wire, epoch);
  }

  /// The root: a vector of each slice.
  __device__ __forceinline__ void send(uint32_t use, uint32_t i) {
    const uint64_t j = index(use, i);
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) v[d] = load(routes_.sent[d], j);
    }
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_ && channels_.reaches(routes_.sent[d], use, i)) {
        push(d, use, i, S::sendable(v[d]));
      }
    }
  }

  __device__ __forceinline__ Arrivals<kRanks> arrivals(uint32_t use, uint32_t i) const {
    const auto counts = Counts<kRanks>::load(channels_.received(i));
    return Arrivals<kRanks>(call_, [&](int source) {
      return slot_offset<S>(call_, 0, counts.of[source] + use + 1, i);
    });
  }

  /// Another rank: a vector of its slice, to itself and on to the others. The masks travel with it.
  __device__ __forceinline__ void forward(uint32_t use, uint32_t i) {
    if (!channels_.reaches(routes_.received[routes_.root], use, i)) return;
    const auto slots = arrivals(use, i);
    Vector v[kRanks];
    const bool arrived = await_vectors<S>(session_, Phase::arrival, use, Vector{}, slots, v,
                                          [this](int source) { return source == root_; });
    Vector wire{};
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source == root_) wire = v[source];
    }
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (arrived && d < world_ && d != routes_.root) push(d, use, i, wire);
    }
    const Vector data = S::received(wire);
    if (!arrived) return;
    store(routes_.received[routes_.root], index(use, i), data);
    rearm(slots, root_);
  }

  /// A vector of every slice that others forward.
  __device__ __forceinline__ void take_forwarded(uint32_t use, uint32_t i) {
    uint32_t from = 0;
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_ && d != routes_.root && channels_.reaches(routes_.received[d], use, i)) {
        from |= 1u << rank_at(d);
      }
    }
    if (from == 0) return;
    const auto slots = arrivals(use, i);
    Vector v[kRanks];
    const bool arrived = await_vectors<S>(session_, Phase::gather, use, Vector{}, slots, v,
                                          [=](int source) { return (from >> source & 1) != 0; });
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if ((from >> source & 1) == 0) continue;
      v[source] = S::received(v[source]);
      if (!arrived) continue;
      const int d = source >= call_.rank ? source - call_.rank : source - call_.rank + world_;
      store(routes_.received[d], index(use, i), v[source]);
      S::rearm(slots.slot[source]);
    }
  }

  static __device__ __forceinline__ void rearm(const Arrivals<kRanks>& slots, int rank) {
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source == rank) S::rearm(slots.slot[source]);
    }
  }

  Session<false>& session_;
  const KernelCall& call_;
  const Routes& routes_;
  const int world_, root_;
  Channels<false> channels_;
};

template <int W>
__global__ void __launch_bounds__(512, 2)
    pipelined(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  Session<false> session(call);
  Pipeline<W>(session, routes).run();
}

struct Family {
  template <int W>
  static Kernel kernel() {
    return reinterpret_cast<Kernel>(pipelined<W>);
  }
};

}  // namespace

Kernel broadcast_pipelined(int world) { return find_world<Family>(world); }

}  // namespace collx::cuda
