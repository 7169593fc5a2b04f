// A one-way collective over channels: every rank sends messages to some ranks, and takes messages
// from some. Shared by the kernels that differ in how the routes become known.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/channels.cuh"
#include "../transports/sinks.cuh"
#include "../transports/sources.cuh"

namespace collx::cuda {

/// The operations of a thread on one vector of a use.
template <typename Stage, typename T>
class OneWay {
  using Wire = WireFor<Stage>;
  static constexpr int kRanks = T::kRanks;
  static constexpr bool kSimple = T::kSimple;
  static constexpr bool kWhole = T::kWhole;

 public:
  __device__ __forceinline__ OneWay(Session<T>& session, const Routes& routes, int world)
      : session_(session), call_(session.call), routes_(routes), world_(world) {}

  __device__ __forceinline__ void send(uint32_t use, uint32_t i) {
    const auto& channels = session_.transport;
    bool sends[kRanks] = {}, any = false;
    for_peers<kRanks>(kRanks, [&](int d) {
      any |= sends[d] = d < world_ && channels.reaches(routes_.from[d], use, i);
    });
    if (!any) return;
    const uint64_t j = index(use, i);
    const Counts<kRanks> counts = channels.sent(i);
    Vector v[kRanks];
    load_each<kWhole>(routes_, kRanks, j, v, [&](int d) { return sends[d]; });
    const Counts<kRanks> done = channels.done(i);
    for_peers<kRanks>(kRanks, [&](int d) {
      if (!sends[d]) return;
      const int peer = call_.rank_at(d, world_);
      const Vector sent = Wire::to_wire(v[d]);
      const uint32_t epoch = counts[peer] + use + 1;
      if (!channels.writable(session_.patience, peer, i, epoch, done[peer])) return;
      Wire::push(call_.outgoing[d] + slot_offset(call_, 0, epoch, i), sent);
    });
  }

  struct Taken {
    Vector v[kRanks];
    uint32_t ranks;  // a bit for each; zero if nothing has arrived
  };

  /// Takes a vector from every rank whose message reaches this vector, and re-arms the slots.
  __device__ __forceinline__ Taken take(uint32_t use, uint32_t i) {
    const auto& channels = session_.transport;
    Taken taken{};
    uint32_t ranks = 0;
    for_peers<kRanks>(world_, [&](int d) {
      if (channels.reaches(routes_.to[d], use, i)) ranks |= 1u << call_.rank_at(d, world_);
    });
    const bool takes_own = T::kTakesOwn && channels.reaches(routes_.to[0], use, i);
    if (ranks == 0 && !takes_own) return taken;
    const Counts<kRanks> counts = channels.received(i);
    // Requested before the wait, so that both latencies overlap.
    const Vector own =
        Stage::kReduces || takes_own ? load<kWhole>(routes_.from[0], index(use, i)) : Vector{};
    const Arrivals<kRanks, false> arrivals(
        call_, [&](int rank) { return slot_offset(call_, 0, counts.of[rank] + use + 1, i); });
    const auto slots = from_slots_of<Wire>(session_, Phase::arrival, use, arrivals, ranks, own);
    if (!slots.take(taken.v)) return taken;
    taken.ranks = takes_own ? ranks | 1u << call_.rank : ranks;
    slots.rearm();
    return taken;
  }

  __device__ __forceinline__ void put(uint32_t use, uint32_t i, const Taken& taken) {
    if (taken.ranks == 0) return;
    const uint64_t j = index(use, i);
    if constexpr (Stage::kReduces) {
      store<kWhole>(routes_.to[0], j, Stage::template reduced<kSimple>(call_, world_, taken.v));
    } else {
      store_each<kWhole>(call_, routes_, world_, j, taken.v, taken.ranks);
    }
  }

 private:
  __device__ __forceinline__ uint64_t index(uint32_t use, uint32_t i) const {
    return Wire::data_index(kSimple ? i : uint64_t{use} * call_.capacity + i);
  }

  Session<T>& session_;
  const KernelCall& call_;
  const Routes& routes_;
  const int world_;
};

/// Runs through the slots of channels, use by use: sends to all, takes from all, and announces it
/// to the senders. `meet` runs after the first sends and determines the messages that arrive;
/// false: none will arrive. `keep(slice)` does the work within this rank.
template <typename Stage, typename T, typename Meet, typename Keep>
__device__ __forceinline__ void run_one_way(Session<T>& session, const Routes& routes, int world,
                                            Meet meet, Keep keep) {
  constexpr bool kSimple = T::kSimple;
  T& channels = session.transport;
  OneWay<Stage, T> way(session, routes, world);
  uint32_t uses = 1;
  for (uint32_t use = 0; use < uses; ++use) {
    channels.for_own([&](uint32_t i) { way.send(use, i); });
    if (use == 0) {
      if (!meet()) return;
      channels.hand_back(session.patience);
      if constexpr (!kSimple) uses = channels.all_uses();
    }
    keep(Slice{use, uses});
    channels.for_own([&](uint32_t i) { way.put(use, i, way.take(use, i)); });
    channels.finish_use(session.patience, use, uses);
  }
}

/// The same for messages that are known at the start.
template <typename Stage, typename T>
__device__ __forceinline__ void run_one_way(Session<T>& session, const Routes& routes, int world) {
  // In a reduction the root's own values go through the stage. All other kept values are copied.
  const auto keep = [&](Slice slice) {
    if (!Stage::kReduces || routes.root != 0)
      copy_own<T::kSimple>(routes.from[0], routes.to[0], slice);
    clear<T::kSimple>(routes.cleared, slice);
  };
  run_one_way<Stage>(
      session, routes, world, [] { return true; }, keep);
}

}  // namespace collx::cuda
