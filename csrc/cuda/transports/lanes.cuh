// Lanes: large calls by chunks, each of which is announced by a counter.
//
// MEMORY LAYOUT  protocol/cuda_layout.h: LaneArea. Block b serves lane b. The chunks of a part are
// dealt to the lanes in turn.
// ROLES  A block has five, each at its own pace: one scatters, one reduces, one gathers, and two
// tell the peers. What tells is apart from what stores: its fence waits until all that its
// multiprocessor has stored has arrived, during which the others go on.
// MEMORY SEMANTICS  Data is plain. A role that has stored a chunk arrives at a barrier; behind it
// one thread for each peer stores the peer's word with release. A role that takes a chunk waits for
// the word with acquire, one thread for each peer, before a barrier of the role. A word tells what
// its sender has consumed, too: the roles hand that over in shared memory with release and acquire.
// What earlier calls consumed is told at the start of a call, since the kernel boundary has ordered
// it.
// CREDIT  Chunk x of a ring goes into the slot of chunk x - R when the peer has consumed that one.
// The word of chunk i of a call waits until its own side has consumed i - R + 2 chunks of the call:
// so it tells enough for the peer's chunk i + 1.
// FAILURE  A thread whose wait fails marks the block as failed. From then on no role stores to a
// peer or tells anything, and each goes on to its end without waiting for peers, so that no role
// waits for another one for ever.
#pragma once

#include "../../protocol/epoch.h"
#include "../ptx/barrier.cuh"
#include "session.cuh"

namespace collx::cuda {

/// A second argument, for the kernels that go through lanes.
struct LaneArguments {
  LaneArea area;
  uint32_t chunks;              // of each lane, to each peer in each stage
  uint32_t chunk_vectors;       // of each of them
  uint32_t fingerprint;         // of what all ranks must have in common
  char* output[kMaxCudaRanks];  // by distance, where results go into the outputs; else null
};

/// The threads of a block that have one role. `barrier`: their own.
struct Team {
  int thread;
  int threads;
  uint32_t barrier;
};

/// Vectors of a part: `size` of them, as far as there are so many.
struct Chunk {
  uint64_t first;
  uint32_t size;

  __device__ __forceinline__ int count(const Part& part) const {
    if (first >= part.count) return 0;
    const uint64_t left = part.count - first;
    return static_cast<int>(left < size ? left : size);
  }
};

template <int W>
class Lanes : public Transport {
  static constexpr int kRanks = World<W>::kRanks;
  static constexpr int kScatters = 64, kReduces = 128, kGathers = 64;
  static constexpr int kWarp = kWarpLanes, kTells = kWarp;
  static_assert(kScatters + kReduces + kGathers + 2 * kTells == kLaneBlock);
  // Barriers. Of the last two kinds there is one for each slot: who stores goes on ahead of who
  // tells, but not by more than a ring.
  enum : uint32_t {
    kScatter = 1,
    kReduce,
    kGather,
    kScattered,
    kReduced = kScattered + kRingSlots
  };
  static_assert(kReduced + kRingSlots <= 16);

  /// What the roles of a block tell each other.
  struct Shared {
    uint32_t told[kLaneStages];  // chunks of this call that the role that tells has seen stored
    uint32_t gathered;           // chunks of this call, of all peers
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

  /// Runs the roles. Each is called for each chunk, by the threads of its team, and returns whether
  /// `ready()` was true, which it calls before it stores to a peer or takes from one.
  template <typename Scatter, typename Reduce, typename Gather>
  __device__ __forceinline__ void run(Patience& patience, Scatter scatter, Reduce reduce,
                                      Gather gather) {
    const int t = static_cast<int>(threadIdx.x);
    if (t < kScatters) {
      run_scatter(patience, {t, kScatters, kScatter}, scatter);
    } else if (t < kScatters + kReduces) {
      run_reduce(patience, {t - kScatters, kReduces, kReduce}, reduce);
    } else if (t < kScatters + kReduces + kGathers) {
      run_gather(patience, {t - kScatters - kReduces, kGathers, kGather}, gather);
    } else if (t < kLaneBlock - kTells) {
      tell(patience, 0, kScatters, kScattered);
    } else {
      tell(patience, 1, kReduces, kReduced);
    }
  }

  __device__ __forceinline__ bool direct() const { return lanes_.output[1] != nullptr; }

  __device__ __forceinline__ bool overlaps() const { return busy_ != 0; }

  /// Counts the chunks, by additions of which nobody waits for the result.
  __device__ __forceinline__ void end() const {
    const int distance = static_cast<int>(threadIdx.x) + 1;
    if (distance < world_) {
      LaneCounts& own = counts(distance);
      const int stages = direct() ? 1 : kLaneStages;
      for (int stage = 0; stage < stages; ++stage) {
        ptx::red_add(&own.sent[stage], lanes_.chunks);
        ptx::red_add(&own.consumed[stage], lanes_.chunks);
      }
      if (direct()) ptx::red_add(&own.direct, 1);
    }
    if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(busy()) = 0;
  }

 private:
  /// Of a word that has come there is no more to check.
  static constexpr auto kNoMore = [](int) { return true; };

  template <typename Body>
  __device__ __forceinline__ void run_scatter(Patience& patience, const Team team, Body body) {
    const uint32_t sent = lead_count(team.thread, [](LaneCounts& c) { return &c.sent[0]; });
    const uint32_t places = ring_places([](LaneCounts& c) { return &c.sent[0]; });
    bool going = true;
    for (uint32_t i = 0; i < lanes_.chunks; ++i) {
      const auto ready = [&] {
        return await(
            patience, team, team.thread, Phase::release, sent + i + 1 - kRingSlots,
            [&](int rank) { return consumed_in(words(rank).ring[0]); }, kNoMore);
      };
      const auto slot = [&](int distance) { return slot_at(distance, 0, places, i); };
      going = going && body(team, chunk(i), ready, slot);
      hand_over(0, i, going, kScattered, kScatters);
    }
  }

  template <typename Body>
  __device__ __forceinline__ void run_reduce(Patience& patience, const Team team, Body body) {
    // The first warp waits for chunks, and the second one for room for results.
    const bool waits = team.thread < kWarp;
    const int leader = team.thread % kWarp + (team.thread < 2 * kWarp ? 0 : kWarp);
    const uint32_t count =
        lead_count(leader, [&](LaneCounts& c) { return waits ? &c.consumed[0] : &c.sent[1]; });
    const uint32_t taken = ring_places([](LaneCounts& c) { return &c.consumed[0]; });
    const uint32_t given = ring_places([](LaneCounts& c) { return &c.sent[1]; });
    bool going = true;
    for (uint32_t i = 0; i < lanes_.chunks; ++i) {
      const auto ready = [&] {
        if (!waits) {
          return await(
              patience, team, direct() ? kWarp : leader, Phase::release, count + i + 1 - kRingSlots,
              [&](int rank) { return consumed_in(words(rank).ring[1]); }, kNoMore);
        }
        return await(
            patience, team, leader, Phase::arrival, count + i + 1,
            [&](int rank) { return sent_in(words(rank).ring[0]); },
            [&](int rank) { return i > 0 || is_same_call(patience, rank); });
      };
      const auto from = [&](int distance) { return own_slot(distance, 0, taken, i); };
      const auto to = [&](int distance) { return slot_at(distance, 1, given, i); };
      going = going && body(team, chunk(i), ready, from, to);
      hand_over(1, i, going, kReduced, kReduces);
    }
  }

  template <typename Body>
  __device__ __forceinline__ void run_gather(Patience& patience, const Team team, Body body) {
    if (direct()) {
      const uint32_t calls = lead_count(team.thread, [](LaneCounts& c) { return &c.direct; });
      await(
          patience, team, team.thread, Phase::gather, calls + 1,
          [&](int rank) { return ptx::ld_acquire_sys(&words(rank).direct); }, kNoMore);
      return;
    }
    const uint32_t count = lead_count(team.thread, [](LaneCounts& c) { return &c.consumed[1]; });
    const uint32_t places = ring_places([](LaneCounts& c) { return &c.consumed[1]; });
    bool going = true;
    for (uint32_t i = 0; i < lanes_.chunks; ++i) {
      const auto ready = [&] {
        return await(
            patience, team, team.thread, Phase::gather, count + i + 1,
            [&](int rank) { return sent_in(words(rank).ring[1]); }, kNoMore);
      };
      const auto slot = [&](int distance) { return own_slot(distance, 1, places, i); };
      going = going && body(team, chunk(i), ready, slot);
      ptx::bar_sync(team.barrier, team.threads);
      if (team.thread == 0) ptx::st_release_cta(&shared().gathered, i + 1);
    }
  }

  /// Hands chunk i to the role that tells the peers. Who stores is never more than a ring ahead of
  /// who tells: its chunk i has the peers' credit only when chunk i - R was told. In a call that
  /// has failed there is no credit.
  __device__ __forceinline__ void hand_over(int stage, uint32_t i, bool going, uint32_t barrier,
                                            int threads) {
    while (!going && ptx::ld_acquire_cta(&shared().told[stage]) + kRingSlots < i + 1) {
    }
    ptx::bar_arrive(barrier + i % kRingSlots, threads + kTells);
  }

  /// Tells each peer what `threads` threads of this block have stored for it, by one warp.
  __device__ __forceinline__ void tell(const Patience& patience, int stage, int threads,
                                       uint32_t barrier) {
    const int thread = static_cast<int>(threadIdx.x) % kWarp;
    const bool leads = thread + 1 < world_;
    const int distance = leads ? thread + 1 : 1;
    LaneCounts& own = counts(distance);
    const uint32_t sent = ptx::ld_relaxed_gpu(&own.sent[stage]);
    const uint32_t consumed = ptx::ld_relaxed_gpu(&own.consumed[stage]);
    const uint32_t calls = ptx::ld_relaxed_gpu(&own.direct);
    LaneWords& peer = words_at(distance);
    const bool staged = stage == 0 || !direct();
    if (leads && staged && patience.alive()) {
      ptx::st_relaxed_sys(&peer.fingerprint, lanes_.fingerprint);
      ptx::st_relaxed_sys(&peer.ring[stage].word, word(sent, consumed));
    }
    for (uint32_t i = 0; i < lanes_.chunks; ++i) {
      ptx::bar_sync(barrier + i % kRingSlots, threads + kTells);
      if (thread == 0) ptx::st_release_cta(&shared().told[stage], i + 1);
      if (!leads || !staged) continue;
      // What has been reduced or gathered. Those roles' waits are bounded, and so is this one.
      uint32_t used;
      do {
        used = ptx::ld_acquire_cta(stage == 0 ? &shared().told[1] : &shared().gathered);
      } while (used + kRingSlots < i + 2);
      if (!failed()) {
        ptx::st_release_sys(&peer.ring[stage].word, word(sent + i + 1, consumed + used));
      }
    }
    if (leads && !staged && !failed()) ptx::st_release_sys(&peer.direct, calls + 1);
  }

  /// Waits, by one thread of the team for each peer: `leader` is which of them a thread is.
  /// `then(rank)` checks what has come. Then meets the team. False, for all of it, if something
  /// failed.
  template <typename Load, typename Then>
  __device__ __forceinline__ bool await(Patience& patience, const Team& team, int leader,
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
    return !ptx::bar_or(team.barrier, team.threads, missing);
  }

  /// Whether a rank makes the same call. Its first chunk of the call has come, and its next call
  /// cannot begin before this rank has answered.
  __device__ __forceinline__ bool is_same_call(Patience& patience, int rank) const {
    const uint32_t mark = ptx::ld_relaxed_sys(&words(rank).fingerprint);
    if (mark == lanes_.fingerprint) return true;
    patience.fail(Failure::mismatch, Phase::arrival,
                  Blame{rank, lanes_.fingerprint, mark, static_cast<int>(blockIdx.x)});
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

  __device__ __forceinline__ Chunk chunk(uint32_t i) const {
    const uint64_t number = static_cast<uint64_t>(i) * gridDim.x + blockIdx.x;
    return {number * lanes_.chunk_vectors, lanes_.chunk_vectors};
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
