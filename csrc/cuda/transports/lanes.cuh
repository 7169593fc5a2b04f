// Lanes: large calls by chunks, each of which is announced by a counter.
//
// MEMORY LAYOUT  protocol/cuda_layout.h: LaneArea. Block b serves lane b. The chunks of a message
// are dealt to the lanes in turn.
//
// ROLES  A block has several, each at its own pace: one scatters; one takes what is scattered, and
// reduces or stores it; one gathers results, or copies what stays on this rank; and one for each
// ring announces progress to the peers. The fence of an announcement waits until all stores of the
// multiprocessor have arrived. The roles that store go on meanwhile, since they do not announce.
//
// MEMORY SEMANTICS  Data is plain. A role publishes its progress in shared memory: behind a barrier
// of the role one thread stores it with release, and the announcing role loads it with acquire. One
// thread for each peer then stores the peer's word with release. A role that takes a chunk waits
// for the word with acquire, one thread for each peer, before a barrier of the role. A word tells
// what its sender has consumed, too. What earlier calls consumed is told at the start of a call,
// since the kernel boundary has ordered it.
//
// CREDIT  Chunk x of a ring goes into the slot of chunk x - R when the peer has consumed that one.
// While a rank sends, the word of its chunk i waits until it has consumed i - R + 2 chunks of the
// peer in this call, or all: so it tells enough for the peer's chunk i + 1. A rank that sends less
// than it takes tells the rest when it is consumed; of the last chunks the next call tells.
//
// FAILURE  A thread whose wait fails marks the block as failed. From then on no role waits, stores
// to a peer or tells anything.
#pragma once

#include "../../protocol/epoch.h"
#include "../../protocol/uses.h"
#include "../ptx/barrier.cuh"
#include "session.cuh"

namespace collx::cuda {

/// A second argument, for the kernels that go through lanes. Arrays are by distance.
struct LaneArguments {
  LaneArea area;
  LaneChunks sent[kMaxCudaRanks];       // to each peer; 0: what is set to zero on this rank
  LaneChunks received[kMaxCudaRanks];   // from each peer; 0: what is copied on this rank
  uint32_t fingerprint[kMaxCudaRanks];  // of what this rank and the peer must have in common
  char* output[kMaxCudaRanks];          // where results go into the outputs; else null
  // Calls without results: threads of a block that scatter, and that take. The others copy what
  // stays on this rank.
  int32_t scatters;
  int32_t takes;
  bool in_place;  // the chunk that is taken overwrites the chunk that is sent
};

/// The threads of a block that have one role. `barrier`: their own.
struct RoleThreads {
  int thread;
  int threads;
  uint32_t barrier;
};

/// Vectors of a message: `count` of them.
struct Chunk {
  uint64_t first;
  uint32_t count;
};

/// `Rings`: for each ordered pair of ranks; one carries what is scattered, the other one results.
template <int W, int Rings>
class Lanes : public Transport {
  static constexpr int kRanks = World<W>::kRanks;
  static constexpr int kWarp = kWarpLanes;
  static constexpr int kTells = kLaneBlock - Rings * kWarp;  // the first thread of those that tell
  enum : uint32_t { kScatter = 1, kTake, kThird };           // barriers of the roles

  /// What the roles of a block tell each other: chunks of this call that are done with.
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
  /// What the kernel is given besides is not the transport's.
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
  /// peer or take from one.
  template <typename Scatter, typename Take, typename Third>
  __device__ __forceinline__ void run(Patience& patience, Scatter scatter, Take take, Third third) {
    const int t = static_cast<int>(threadIdx.x);
    if (t >= kTells) {
      if (Rings == 1 || t < kTells + kWarp) {
        tell(patience, 0, shared().scattered, shared().taken);
      } else {
        tell(patience, 1, shared().taken, shared().gathered);
      }
      return;
    }
    const int scatters = Rings > 1 ? 64 : lanes_.scatters, takes = Rings > 1 ? 128 : lanes_.takes;
    if (t < scatters) return run_scatter(patience, {t, scatters, kScatter}, scatter);
    if (t < scatters + takes) return run_take(patience, {t - scatters, takes, kTake}, take);
    const RoleThreads role{t - scatters - takes, kTells - scatters - takes, kThird};
    if constexpr (Rings > 1) {
      run_gather(patience, role, third);
    } else {
      third(role);
    }
  }

  /// Chunk i of a message of `vectors`.
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

  /// Counts the chunks, by additions of which nobody waits for the result.
  __device__ __forceinline__ void end() const {
    const int distance = static_cast<int>(threadIdx.x) + 1;
    if (distance < world_) {
      LaneCounts& own = counts(distance);
      const int rings = direct() ? 1 : Rings;
      for (int ring = 0; ring < rings; ++ring) {
        ptx::red_add(&own.sent[ring], lanes_.sent[distance].count);
        ptx::red_add(&own.consumed[ring], lanes_.received[distance].count);
      }
      if (direct()) ptx::red_add(&own.direct, 1);
    }
    if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(busy()) = 0;
  }

 private:
  /// Of a word that has come there is no more to check.
  static constexpr auto kNoMore = [](int) { return true; };

  template <typename Body>
  __device__ __forceinline__ void run_scatter(Patience& patience, const RoleThreads role,
                                              Body body) {
    const uint32_t sent = lead_count(role.thread, [](LaneCounts& c) { return &c.sent[0]; });
    const uint32_t places = ring_places([](LaneCounts& c) { return &c.sent[0]; });
    const uint32_t most = longest(lanes_.sent);
    for (uint32_t i = 0; i < most; ++i) {
      const auto ready = [&] {
        return await(
            patience, role, leader_of(role.thread, lanes_.sent, i), Phase::release,
            sent + i + 1 - kRingSlots, [&](int rank) { return consumed_in(words(rank).ring[0]); },
            kNoMore);
      };
      const auto slot = [&](int distance) { return slot_at(distance, 0, places, i); };
      if (!body(role, i, ready, slot)) return;
      publish(role, shared().scattered, i + 1);
    }
  }

  template <typename Body>
  __device__ __forceinline__ void run_take(Patience& patience, const RoleThreads role, Body body) {
    // The first warp waits for chunks, and the second one for room for results.
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
        if (!waits) {
          return await(
              patience, role, direct() ? kWarp : thread, Phase::release, count + i + 1 - kRingSlots,
              [&](int rank) { return consumed_in(words(rank).ring[1]); }, kNoMore);
        }
        if (lanes_.in_place) {
          while (ptx::ld_acquire_cta(&shared().scattered) <= i && !failed()) {
          }
        }
        return await(
            patience, role, leader_of(thread, lanes_.received, i), Phase::arrival, count + i + 1,
            [&](int rank) { return sent_in(words(rank).ring[0]); },
            [&](int rank) { return i > 0 || is_same_call(patience, rank, count); });
      };
      const auto from = [&](int distance) { return own_slot(distance, 0, taken, i); };
      const auto to = [&](int distance) { return slot_at(distance, 1, given, i); };
      if (!body(role, i, ready, from, to)) return;
      publish(role, shared().taken, i + 1);
    }
  }

  /// Results that go into the outputs it only waits for.
  template <typename Body>
  __device__ __forceinline__ void run_gather(Patience& patience, const RoleThreads role,
                                             Body body) {
    if (direct()) {
      const uint32_t calls = lead_count(role.thread, [](LaneCounts& c) { return &c.direct; });
      await(
          patience, role, role.thread, Phase::gather, calls + 1,
          [&](int rank) { return ptx::ld_acquire_sys(&words(rank).direct); }, kNoMore);
      return;
    }
    const uint32_t count = lead_count(role.thread, [](LaneCounts& c) { return &c.consumed[1]; });
    const uint32_t places = ring_places([](LaneCounts& c) { return &c.consumed[1]; });
    for (uint32_t i = 0; i < lanes_.sent[1].count; ++i) {
      const auto ready = [&] {
        return await(
            patience, role, role.thread, Phase::gather, count + i + 1,
            [&](int rank) { return sent_in(words(rank).ring[1]); }, kNoMore);
      };
      const auto slot = [&](int distance) { return own_slot(distance, 1, places, i); };
      if (!body(role, i, ready, slot)) return;
      publish(role, shared().gathered, i + 1);
    }
  }

  /// Publishes the progress of a role, behind a barrier of all its threads.
  __device__ __forceinline__ void publish(const RoleThreads& role, uint32_t& progress,
                                          uint32_t done) {
    ptx::bar_sync(role.barrier, role.threads);
    if (role.thread == 0) ptx::st_release_cta(&progress, done);
  }

  /// Tells each peer, by one thread, what has been stored into its ring and consumed of its own.
  /// The roles' waits are bounded, and so is this one.
  __device__ __forceinline__ void tell(const Patience& patience, int ring, const uint32_t& stored,
                                       const uint32_t& used) {
    const int distance = static_cast<int>(threadIdx.x) % kWarp + 1;
    if (distance >= world_) return;
    const LaneCounts& own = counts(distance);
    LaneWords& peer = words_at(distance);
    const uint32_t sends = lanes_.sent[distance].count;
    const uint32_t takes = lanes_.received[distance].count;
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
    uint32_t told = 0, told_used = 0;
    while ((told < sends || told_used + kRingSlots / 2 < takes) && !failed()) {
      const uint32_t is_used = min(ptx::ld_acquire_cta(&used), takes);
      const uint32_t is_stored = min(ptx::ld_acquire_cta(&stored), sends);
      // As many as tell enough for what the peer sends next.
      const uint32_t next = is_used < takes ? min(is_stored, is_used + kRingSlots - 1) : is_stored;
      if (next == told && (told < sends || is_used == told_used)) continue;
      // Which call the first chunk is of. Its slot is free, and so is the place of this mark.
      if (ring == 0 && told == 0 && next > 0) {
        ptx::st_relaxed_sys(&peer.fingerprint[sent % kRingSlots], lanes_.fingerprint[distance]);
      }
      told = next;
      told_used = is_used;
      ptx::st_release_sys(&peer.ring[ring].word, word(sent + told, consumed + told_used));
    }
  }

  /// Waits, by one thread of the role for each peer: `leader` is which of them a thread is.
  /// `then(rank)` checks what has come. Then meets the role. False, for all of it, if something
  /// failed.
  template <typename Load, typename Then>
  __device__ __forceinline__ bool await(Patience& patience, const RoleThreads& role, int leader,
                                        Phase phase, uint32_t expected, Load load, Then then) {
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
    return !ptx::bar_or(role.barrier, role.threads, missing);
  }

  /// Which peer's leader a thread is, if a message of that peer has a chunk i; else nobody's.
  __device__ __forceinline__ int leader_of(int thread, const LaneChunks (&chunks)[kMaxCudaRanks],
                                           uint32_t i) const {
    return thread + 1 < world_ && i < chunks[thread + 1].count ? thread : kMaxCudaRanks;
  }
  /// Chunks of the longest message.
  __device__ __forceinline__ uint32_t longest(const LaneChunks (&chunks)[kMaxCudaRanks]) const {
    uint32_t most = chunks[1].count;
#pragma unroll 1
    for (int distance = 2; distance < world_; ++distance) most = max(most, chunks[distance].count);
    return most;
  }

  /// Whether a rank makes the same call. Its first chunk of the call has come, and its mark stands
  /// until this rank has consumed that chunk.
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

  /// The words that a rank stores here, and those that this rank stores at another one.
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

  /// What is counted of the peer for which a thread waits.
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
  /// Of chunk i, in this rank's ring at the peer at that distance.
  __device__ __forceinline__ Vector* slot_at(int distance, int stage, uint32_t places,
                                             uint32_t i) const {
    return reinterpret_cast<Vector*>(
        call_.peer[distance] +
        slot_offset(stage, world_ - distance, (places >> kPlaceBits * distance) + i));
  }
  /// Of chunk i, in that peer's ring here.
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
