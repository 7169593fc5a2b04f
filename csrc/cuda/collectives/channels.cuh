// A one-way collective over channels: every rank sends messages to some ranks, and takes messages
// from some. For the kernels that differ in how the routes become known.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/channels.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {

template <typename Combine, int W, bool Simple>
class OneWay {
  using S = typename Combine::Slots;
  static constexpr int kRanks = World<W>::kRanks;
  static constexpr bool kReduces = !Combine::kCopies;

 public:
  /// `vectors`: on the wire, of the longest message.
  __device__ OneWay(Session<Simple>& session, const Routes& routes, uint64_t vectors)
      : session_(session),
        call_(session.call),
        routes_(routes),
        vectors_(vectors),
        world_(World<W>::size(call_)),
        channels_(call_, routes, vectors) {}

  __device__ void run() {
    // In a reduction the root's own values go through the stage; everything else stays here.
    const bool keeps = !kReduces || routes_.root != 0;
    const auto keep_own = [&] {
      if (keeps) copy_own<Simple>(routes_.from[0], routes_.to[0]);
      clear<Simple>(routes_.cleared);
    };
    if constexpr (Simple) {
      // The senders are told before the output is written: they wait for the slots alone.
      Taken taken{};
      channels_.for_own([&](uint32_t i) { send(0, i); });
      keep_own();
      channels_.for_own([&](uint32_t i) { taken = take(0, i); });
      channels_.finish_use(session_, 0);
      channels_.for_own([&](uint32_t i) { put(0, i, taken); });
    } else {
      uint32_t use = 0;
      do {
        channels_.for_own([&](uint32_t i) { send(use, i); });
        if (use == 0) keep_own();
        channels_.for_own([&](uint32_t i) { put(use, i, take(use, i)); });
        channels_.finish_use(session_, use);
        ++use;
      } while (uint64_t{use} * call_.capacity < vectors_);
    }
    channels_.finish(session_);
  }

 private:
  __device__ __forceinline__ uint64_t index(uint32_t use, uint32_t i) const {
    return data_index<S>(Simple ? i : uint64_t{use} * call_.capacity + i);
  }
  __device__ __forceinline__ int rank_at(int distance) const {
    const int rank = call_.rank + distance;
    return rank < world_ ? rank : rank - world_;
  }

  __device__ __forceinline__ void send(uint32_t use, uint32_t i) {
    bool sends[kRanks] = {}, any = false;
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      any |= sends[d] = d < world_ && channels_.reaches(routes_.from[d], use, i);
    }
    if (!any) return;
    const uint64_t j = index(use, i);
    const Counts<kRanks> counts = channels_.sent(i);
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (sends[d]) v[d] = d > 1 && routes_.same ? v[1] : load<Simple>(routes_.from[d], j);
    }
    const Counts<kRanks> done = channels_.done(i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (!sends[d]) continue;
      const int peer = rank_at(d);
      const Vector sent = S::sendable(v[d]);
      const uint32_t epoch = counts[peer] + use + 1;
      if (!channels_.writable(session_, peer, i, epoch, done[peer])) continue;
      S::push(call_.outgoing[d] + slot_offset(call_, 0, epoch, i), sent);
    }
  }

  struct Taken {
    Vector v[kRanks];
    uint32_t from;  // ranks, one bit each
  };

  /// A vector from every rank of which a message reaches so far; the slots are armed again.
  __device__ __forceinline__ Taken take(uint32_t use, uint32_t i) {
    Taken taken{};
    uint32_t from = 0;
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_ && channels_.reaches(routes_.to[d], use, i)) from |= 1u << rank_at(d);
    }
    if (from == 0) return taken;
    const Counts<kRanks> counts = channels_.received(i);
    const Vector own = kReduces ? load<Simple>(routes_.from[0], index(use, i)) : Vector{};
    const Arrivals<kRanks> arrivals(
        call_, [&](int source) { return slot_offset(call_, 0, counts.of[source] + use + 1, i); });
    const bool arrived = await_vectors<S>(session_, Phase::arrival, use, own, arrivals, taken.v,
                                          [=](int source) { return (from >> source & 1) != 0; });
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (from >> source & 1) taken.v[source] = S::received(taken.v[source]);
    }
    if (!arrived) return taken;
    taken.from = from;
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (from >> source & 1) S::rearm(arrivals.slot(source));
    }
    return taken;
  }

  __device__ __forceinline__ void put(uint32_t use, uint32_t i, const Taken& taken) {
    if (taken.from == 0) return;
    const uint64_t j = index(use, i);
    if constexpr (kReduces) {
      Combine::template store<Simple>(call_, routes_, world_, j, taken.v);
    } else {
      Combine::template store<Simple>(call_, routes_, world_, j, taken.v, taken.from);
    }
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const Routes& routes_;
  const uint64_t vectors_;
  const int world_;
  Channels<kRanks, Simple> channels_;
};

}  // namespace collx::cuda
