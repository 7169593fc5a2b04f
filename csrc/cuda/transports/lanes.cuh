// Lanes: large calls, divided into chunks. Counters announce the chunks to the peers.
//
// MEMORY LAYOUT  LaneArea in protocol/cuda_layout.h. Block b uses lane b. Consecutive chunks of a
// message go to consecutive lanes.
//
// ROLES  The threads of a block are divided into roles, and each role runs at its own pace. One
// role scatters. One takes the scattered chunks, and reduces or stores them. One gathers results,
// or copies the part that stays on this rank. For each ring, one role announces progress to the
// peers: its fence waits until all stores of the multiprocessor have arrived, while the roles that
// store continue.
//
// MEMORY SEMANTICS  Data is accessed with plain loads and stores. A role publishes its progress in
// shared memory: its threads meet at a barrier, then one thread stores the progress with release.
// The announcing role loads it with acquire; then one thread for each peer stores the word of that
// peer with release. A role that takes a chunk loads the word of the sender with acquire, by one
// thread for each peer, and then meets at a barrier. A word also states what its sender has
// consumed. The first word of a call states what earlier calls have consumed, which the kernel
// boundary has ordered.
//
// CREDIT  A ring has R slots. Chunk x may overwrite chunk x - R when the peer has consumed that
// one. While a rank sends, it announces chunk i only after it has consumed i - R + 2 chunks of the
// peer in this call, or all of them. So the announcement is sufficient for chunk i + 1 of the peer.
// A rank that sends less than it takes announces the rest of the consumption when it happens. The
// next call announces the consumption of the last chunks.
//
// FAILURE  A thread whose wait fails marks the block as failed. After that no role waits, stores to
// a peer or announces progress.
#pragma once

#include "../../protocol/epoch.h"
#include "../../protocol/uses.h"
#include "../ptx/barrier.cuh"
#include "session.cuh"
#include "wide_shape.h"

namespace collx::cuda {

/// A second kernel argument of the kernels that use lanes. Arrays are by distance.
struct LaneArguments {
  LaneArea area;
  LaneChunks sent[kMaxCudaRanks];       // to each peer; 0: chunks that are set to zero on this rank
  LaneChunks received[kMaxCudaRanks];   // from each peer; 0: chunks that are copied on this rank
  LaneChunks passed[kMaxCudaRanks];     // results, to each peer
  LaneChunks gathered[kMaxCudaRanks];   // results, from each peer
  uint32_t fingerprint[kMaxCudaRanks];  // of the properties that this rank and the peer must share
  char* output[kMaxCudaRanks];          // destinations of results in the outputs; else null
  // Calls without results: the number of threads of a block that scatter, and that take. The other
  // threads copy the part that stays on this rank.
  int32_t scatters;
  int32_t takes;
  bool in_place;  // the chunk that is received overwrites the chunk that is sent
  WideShape wide;
};

/// The threads of a block that have one role. `barrier`: the barrier of the role.
struct RoleThreads {
  int thread;
  int threads;
  uint32_t barrier;
};

using ByDistance = const LaneChunks (&)[kMaxCudaRanks];

/// `count` consecutive vectors of a message.
struct Chunk {
  uint64_t first;
  uint32_t count;
};

/// `Rings`: the number of rings for each ordered pair of ranks. One ring carries scattered chunks,
/// the other one carries results.
template <int W, int Rings>
class Lanes : public Transport {
  static constexpr int kRanks = World<W>::kRanks;
  static constexpr int kWarp = kWarpLanes;
  static constexpr int kAnnounces = kLaneBlock - Rings * kWarp;  // the first announcing thread
  enum : uint32_t { kScatter = 1, kTake, kThird };               // barriers of the roles

  /// The progress of the roles: the number of chunks of this call that each has completed.
  struct Shared {
    uint32_t scattered;
    uint32_t taken;
    uint32_t gathered;
    uint32_t failed;
  };

 public:
  __device__ __forceinline__ Lanes(const KernelCall& call, const Patience&,
                                   const LaneArguments& lanes)
      : call_(call), lanes_(lanes), world_(World<W>::size(call)) {
    if (threadIdx.x == 0) {
      shared() = {};
      busy_ = atomicExch(busy(), 1u);
    }
    __syncthreads();
  }
  /// The transport does not use the routes of the kernel.
  __device__ __forceinline__ Lanes(const KernelCall& call, const Patience& patience,
                                   const LaneArguments& lanes, const Routes&)
      : Lanes(call, patience, lanes) {}
  static __device__ __forceinline__ const Routes* pairs(const LaneArguments&) { return nullptr; }
  static __device__ __forceinline__ const Routes* pairs(const LaneArguments&,
                                                        const Routes& routes) {
    return &routes;
  }

  /// Runs the roles. `scatter`, `take` and `gather` are called for each chunk, by the threads of
  /// their role. They return whether `ready()` was true, which they call before they store to a
  /// peer or take from one. `keep`, if any, is called after the last chunk that is gathered.
  template <typename Scatter, typename Take, typename Third, typename... Keep>
  __device__ __forceinline__ void run(Patience& patience, Scatter scatter, Take take, Third third,
                                      Keep... keep) {
    const int t = static_cast<int>(threadIdx.x);
    if (t >= kAnnounces) {
      if (Rings == 1 || t < kAnnounces + kWarp) {
        announce(patience, 0, shared().scattered, shared().taken);
      } else {
        announce(patience, 1, shared().taken, shared().gathered);
      }
      return;
    }
    const int scatters = Rings > 1 ? 64 : lanes_.scatters, takes = Rings > 1 ? 128 : lanes_.takes;
    if (t < scatters) return run_scatter(patience, {t, scatters, kScatter}, scatter);
    if (t < scatters + takes) return run_take(patience, {t - scatters, takes, kTake}, take);
    const RoleThreads role{t - scatters - takes, kAnnounces - scatters - takes, kThird};
    if constexpr (Rings > 1) {
      run_gather(patience, role, third);
      (keep(role), ...);
    } else {
      third(role);
    }
  }

  /// Chunk i of a message of `vectors` vectors.
  __device__ __forceinline__ Chunk chunk(const LaneChunks& chunks, uint32_t i,
                                         uint64_t vectors) const {
    const uint64_t number = static_cast<uint64_t>(i) * gridDim.x + blockIdx.x;
    const uint64_t first = number * chunks.vectors;
    if (i >= chunks.count || first >= vectors) return {first, 0};
    const uint64_t left = vectors - first;
    return {first, static_cast<uint32_t>(left < chunks.vectors ? left : chunks.vectors)};
  }

  __device__ __forceinline__ bool direct() const {
    return Rings > 1 && lanes_.output[1] != nullptr;
  }

  __device__ __forceinline__ bool overlaps() const { return busy_ != 0; }

  /// Adds the chunks of this call to the counts. Nothing waits for the result of these additions.
  __device__ __forceinline__ void end() const {
    const int distance = static_cast<int>(threadIdx.x) + 1;
    if (distance < world_) {
      LaneCounts& own = counts(distance);
      const int rings = direct() ? 1 : Rings;
      for (int ring = 0; ring < rings; ++ring) {
        ptx::red_add(&own.sent[ring], sent(ring)[distance].count);
        ptx::red_add(&own.consumed[ring], received(ring)[distance].count);
      }
      if (direct()) ptx::red_add(&own.direct, 1);
    }
    if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(busy()) = 0;
  }

 private:
  /// The check for words that need no further check.
  static constexpr auto kNoMore = [](int) { return true; };

  template <typename Body>
  __device__ __forceinline__ void run_scatter(Patience& patience, const RoleThreads role,
                                              Body body) {
    const uint32_t sent = lead_count(role.thread, [](LaneCounts& c) { return &c.sent[0]; });
    const uint32_t places = ring_places([](LaneCounts& c) { return &c.sent[0]; });
    const uint32_t most = longest(lanes_.sent);
    for (uint32_t i = 0; i < most; ++i) {
      const auto ready = [&] {
        const bool came = await(
            patience, leader_of(role.thread, lanes_.sent, i), Phase::release,
            sent + i + 1 - kRingSlots, [&](int rank) { return consumed_in(words(rank).ring[0]); },
            kNoMore);
        return meet(role, came);
      };
      const auto slot = [&](int distance) { return slot_at(distance, 0, places, i); };
      if (!body(role, i, ready, slot)) return;
      publish(role, shared().scattered, i + 1);
    }
  }

  template <typename Body>
  __device__ __forceinline__ void run_take(Patience& patience, const RoleThreads role, Body body) {
    // The first warp waits for chunks, and the second one waits for free result slots.
    const bool waits = Rings == 1 || role.thread < kWarp;
    const int thread =
        Rings == 1 ? role.thread : role.thread % kWarp + (role.thread < 2 * kWarp ? 0 : kWarp);
    const uint32_t count =
        lead_count(thread, [&](LaneCounts& c) { return waits ? &c.consumed[0] : &c.sent[1]; });
    const uint32_t taken = ring_places([](LaneCounts& c) { return &c.consumed[0]; });
    const uint32_t given = Rings > 1 ? ring_places([](LaneCounts& c) { return &c.sent[1]; }) : 0;
    const uint32_t most = longest(lanes_.received);
    for (uint32_t i = 0; i < most; ++i) {
      const auto ready = [&] {
        bool came;
        if (!waits) {
          came = await(
              patience, direct() ? kWarp : leader_of(thread, lanes_.passed, i), Phase::release,
              count + i + 1 - kRingSlots,
              [&](int rank) { return consumed_in(words(rank).ring[1]); }, kNoMore);
        } else {
          if (lanes_.in_place) {
            while (ptx::ld_acquire_cta(&shared().scattered) <= i && !failed()) {
            }
          }
          came = await(
              patience, leader_of(thread, lanes_.received, i), Phase::arrival, count + i + 1,
              [&](int rank) { return sent_in(words(rank).ring[0]); },
              [&](int rank) { return i > 0 || is_same_call(patience, rank, count); });
        }
        return meet(role, came);
      };
      const auto from = [&](int distance) { return own_slot(distance, 0, taken, i); };
      const auto to = [&](int distance) { return slot_at(distance, 1, given, i); };
      if (!body(role, i, ready, from, to)) return;
      publish(role, shared().taken, i + 1);
    }
  }

  /// If the peers store results into the outputs, the role only waits until they have finished.
  template <typename Body>
  __device__ __forceinline__ void run_gather(Patience& patience, const RoleThreads role,
                                             Body body) {
    if (direct()) {
      const uint32_t calls = lead_count(role.thread, [](LaneCounts& c) { return &c.direct; });
      const bool came = await(
          patience, role.thread, Phase::gather, calls + 1,
          [&](int rank) { return ptx::ld_acquire_sys(&words(rank).direct); }, kNoMore);
      meet(role, came);
      return;
    }
    const uint32_t count = lead_count(role.thread, [](LaneCounts& c) { return &c.consumed[1]; });
    const uint32_t places = ring_places([](LaneCounts& c) { return &c.consumed[1]; });
    const uint32_t most = longest(lanes_.gathered);
    for (uint32_t i = 0; i < most; ++i) {
      const auto ready = [&] {
        const bool came = await(
            patience, leader_of(role.thread, lanes_.gathered, i), Phase::gather, count + i + 1,
            [&](int rank) { return sent_in(words(rank).ring[1]); }, kNoMore);
        return meet(role, came);
      };
      const auto slot = [&](int distance) { return own_slot(distance, 1, places, i); };
      if (!body(role, i, ready, slot)) return;
      publish(role, shared().gathered, i + 1);
    }
  }

  /// Publishes the progress of a role after a barrier of all its threads.
  __device__ __forceinline__ void publish(const RoleThreads& role, uint32_t& progress,
                                          uint32_t done) {
    ptx::bar_sync(role.barrier, role.threads);
    if (role.thread == 0) ptx::st_release_cta(&progress, done);
  }

  /// Announces to each peer, by one thread, the chunks stored into the peer's ring and the chunks
  /// consumed from this rank's ring. This wait is bounded because the waits of the roles are.
  __device__ __forceinline__ void announce(const Patience& patience, int ring,
                                           const uint32_t& stored, const uint32_t& used) {
    const int distance = static_cast<int>(threadIdx.x) % kWarp + 1;
    if (distance >= world_) return;
    const LaneCounts& own = counts(distance);
    LaneWords& peer = words_at(distance);
    const uint32_t sends = sent(ring)[distance].count;
    const uint32_t takes = received(ring)[distance].count;
    if (ring > 0 && direct()) {
      const uint32_t calls = ptx::ld_relaxed_gpu(&own.direct);
      while (ptx::ld_acquire_cta(&stored) < sends && !failed()) {
      }
      if (!failed()) ptx::st_release_sys(&peer.direct, calls + 1);
      return;
    }
    const uint32_t sent = ptx::ld_relaxed_gpu(&own.sent[ring]);
    const uint32_t consumed = ptx::ld_relaxed_gpu(&own.consumed[ring]);
    if (patience.alive()) ptx::st_relaxed_sys(&peer.ring[ring].word, word(sent, consumed));
    uint32_t announced = 0, announced_used = 0;
    while ((announced < sends || announced_used + kRingSlots / 2 < takes) && !failed()) {
      const uint32_t is_used = min(ptx::ld_acquire_cta(&used), takes);
      const uint32_t is_stored = min(ptx::ld_acquire_cta(&stored), sends);
      // Bounded by the credit that the peer needs for its next chunk (CREDIT).
      const uint32_t next = is_used < takes ? min(is_stored, is_used + kRingSlots - 1) : is_stored;
      if (next == announced && (announced < sends || is_used == announced_used)) continue;
      // The mark names the call of the first chunk. The chunk's slot is free, and therefore its
      // mark is too.
      if (ring == 0 && announced == 0 && next > 0) {
        ptx::st_relaxed_sys(&peer.fingerprint[sent % kRingSlots], lanes_.fingerprint[distance]);
      }
      announced = next;
      announced_used = is_used;
      ptx::st_release_sys(&peer.ring[ring].word, word(sent + announced, consumed + announced_used));
    }
  }

  /// Waits in one thread for each peer. `leader` is the index of the thread's peer. `then(rank)`
  /// checks the peer's word after it has arrived. Returns whether the wait and the check succeeded.
  template <typename Load, typename Then>
  __device__ __forceinline__ bool await(Patience& patience, int leader, Phase phase,
                                        uint32_t expected, Load load, Then then) {
    bool missing = false;
    if (leader + 1 < world_) {
      const int rank = call_.rank_at(leader + 1, world_);
      uint32_t seen = 0;
      const bool came = patience.wait(
          phase,
          [&] {
            seen = load(rank);
            return epoch_reached(seen, expected) || failed();
          },
          [&] {
            return Blame{rank, expected, seen, static_cast<int>(blockIdx.x)};
          });
      missing = !came || failed() || !then(rank);
      if (missing) *const_cast<volatile uint32_t*>(&shared().failed) = 1;
    }
    return !missing;
  }

  /// Returns in every thread of the role whether `came` is true for all of them.
  static __device__ __forceinline__ bool meet(const RoleThreads& role, bool came) {
    return !ptx::bar_or(role.barrier, role.threads, !came);
  }

  /// The chunks in a ring of each peer, and of this rank.
  __device__ __forceinline__ ByDistance sent(int ring) const {
    return ring == 0 ? lanes_.sent : lanes_.passed;
  }
  __device__ __forceinline__ ByDistance received(int ring) const {
    return ring == 0 ? lanes_.received : lanes_.gathered;
  }

  /// The index of the peer for which a thread waits if that peer's message has a chunk i; otherwise
  /// an index without a peer.
  __device__ __forceinline__ int leader_of(int thread, ByDistance chunks, uint32_t i) const {
    return thread + 1 < world_ && i < chunks[thread + 1].count ? thread : kMaxCudaRanks;
  }
  /// The number of chunks of the longest message.
  __device__ __forceinline__ uint32_t longest(ByDistance chunks) const {
    uint32_t most = chunks[1].count;
#pragma unroll 1
    for (int distance = 2; distance < world_; ++distance) most = max(most, chunks[distance].count);
    return most;
  }

  /// Whether a rank makes the same call. The first chunk of its call has arrived, and its mark
  /// remains until this rank has consumed that chunk.
  __device__ __forceinline__ bool is_same_call(Patience& patience, int rank,
                                               uint32_t before) const {
    const uint32_t own = lanes_.fingerprint[call_.distance_to(rank, world_)];
    const uint32_t mark = ptx::ld_relaxed_sys(&words(rank).fingerprint[before % kRingSlots]);
    if (mark == own) return true;
    patience.fail(Failure::mismatch, Phase::arrival,
                  Blame{rank, own, mark, static_cast<int>(blockIdx.x)});
    return false;
  }

  static __device__ __forceinline__ Shared& shared() {
    __shared__ Shared all;
    return all;
  }
  static __device__ __forceinline__ bool failed() {
    return *const_cast<volatile uint32_t*>(&shared().failed) != 0;
  }

  static __device__ __forceinline__ uint64_t word(uint32_t sent, uint32_t consumed) {
    return static_cast<uint64_t>(sent) << 32 | consumed;
  }
  static __device__ __forceinline__ uint32_t sent_in(const LaneWords::Ring& ring) {
    return static_cast<uint32_t>(ptx::ld_acquire_sys(&ring.word) >> 32);
  }
  static __device__ __forceinline__ uint32_t consumed_in(const LaneWords::Ring& ring) {
    return static_cast<uint32_t>(ptx::ld_acquire_sys(&ring.word));
  }

  /// The words that a rank stores here, and the words that this rank stores at a peer.
  __device__ __forceinline__ LaneWords& words(int rank) const {
    return reinterpret_cast<LaneWords*>(call_.own() + lanes_.area.words)[row() + rank];
  }
  __device__ __forceinline__ LaneWords& words_at(int distance) const {
    return reinterpret_cast<LaneWords*>(call_.peer[distance] +
                                        lanes_.area.words)[row() + call_.rank];
  }
  __device__ __forceinline__ LaneCounts& counts(int distance) const {
    return reinterpret_cast<LaneCounts*>(
        call_.own() + lanes_.area.counts)[row() + call_.rank_at(distance, world_)];
  }
  __device__ __forceinline__ int row() const {
    return static_cast<int>(blockIdx.x) * kMaxCudaRanks;
  }
  __device__ __forceinline__ uint32_t* busy() const {
    return reinterpret_cast<uint32_t*>(call_.own() + lanes_.area.busy) + blockIdx.x;
  }

  /// The count for the peer that a thread waits for.
  template <typename Of>
  __device__ __forceinline__ uint32_t lead_count(int leader, Of of) const {
    const int distance = leader + 1;
    return ptx::ld_relaxed_gpu(of(counts(distance < world_ ? distance : 1)));
  }

  /// The places in the rings of all peers at the start of the call, by distance.
  template <typename Of>
  __device__ __forceinline__ uint32_t ring_places(Of of) const {
    uint32_t places = 0;
#pragma unroll
    for (int distance = 1; distance < kRanks; ++distance) {
      if (distance < world_) {
        places |= ptx::ld_relaxed_gpu(of(counts(distance))) % kRingSlots << kPlaceBits * distance;
      }
    }
    return places;
  }
  static constexpr int kPlaceBits = 2;
  static_assert(kRingSlots == 1 << kPlaceBits && kMaxCudaRanks * kPlaceBits <= 32);

  __device__ __forceinline__ uint64_t slot_offset(int stage, int distance, uint32_t place) const {
    return lanes_.area.ring(world_, stage, blockIdx.x, distance) +
           place % kRingSlots * lanes_.area.slot_bytes;
  }
  /// The slot of chunk i in this rank's ring at the peer at that distance.
  __device__ __forceinline__ Vector* slot_at(int distance, int stage, uint32_t places,
                                             uint32_t i) const {
    return reinterpret_cast<Vector*>(
        call_.peer[distance] +
        slot_offset(stage, world_ - distance, (places >> kPlaceBits * distance) + i));
  }
  /// The slot of chunk i in that peer's ring on this rank.
  __device__ __forceinline__ const Vector* own_slot(int distance, int stage, uint32_t places,
                                                    uint32_t i) const {
    return reinterpret_cast<const Vector*>(
        call_.own() + slot_offset(stage, distance, (places >> kPlaceBits * distance) + i));
  }

  const KernelCall& call_;
  const LaneArguments& lanes_;
  const int world_;
  uint32_t busy_ = 0;
};

}  // namespace collx::cuda
