// Lanes for calls with few blocks: a block uses several lanes, and copies through shared memory.
//
// A ring of one lane is smaller than what a link holds while a chunk is announced, taken and
// acknowledged, so few blocks with one lane each leave the link idle. Here chunk i of a block goes
// to lane i % n of its n lanes, as chunk i / n of that lane. Rings, words and counts are those of
// lanes.cuh and have the same meaning: other calls of the communicator cannot distinguish this call
// from one with more blocks.
//
// ROLES  One role scatters, one takes, and one gathers results or copies the part that stays on
// this rank. For each ring, one warp watches the words that the peers store, by one thread for each
// word, and publishes the arrivals in shared memory. Another warp announces progress. Thus a role
// never polls global memory to find out whether it may continue.
//
// BULK  If the tensors are whole vectors in one run, a role is one thread that moves whole chunks
// through stages of shared memory (wide_stages.cuh); for a reduction its other threads add up the
// values of a stage. Otherwise the threads of a role move vectors as in lanes.cuh.
//
// MEMORY SEMANTICS  A watching thread loads a word with acquire.sys and stores the progress that it
// states in shared memory with release.cta. A role loads that with acquire.cta. Between the two,
// the watching thread fences the async proxy, in which bulk copies read and overwrite slots. A role
// publishes a chunk as stored when its bulk stores have arrived (wait_stored, never wait_read), and
// as consumed when it is in shared memory. The announcing warp loads that with acquire.cta, and
// stores the words behind one fence.acq_rel.sys for all lanes.
//
// CREDIT  All consumption is announced when it happens, except that of the last chunks of a lane,
// which the next call announces. A role publishes all that it has stored before it waits for
// credit.
//
// FAILURE  As in lanes.cuh. Only the watching threads wait for peers, and each of their waits is
// bounded. Every other wait ends when they mark the block as failed.
#pragma once

#include "lanes.cuh"
#include "wide_stages.cuh"

namespace collx::cuda {

template <int Rings>
class WideLanes : public Transport {
 public:
  static constexpr int kScatters = 64, kTakes = 128, kThirds = 64;  // threads of the roles

 private:
  static constexpr int kWarp = kWarpLanes;
  static constexpr int kWatches = kScatters + kTakes + kThirds;  // the first watching thread
  static constexpr int kAnnounces = kWatches + Rings * kWarp;
  static constexpr int kMostStages = 16;

 public:
  static constexpr int kThreads = kAnnounces + Rings * kWarp;
  enum Role : uint32_t { kScatter, kTake, kThird };

 private:
  /// By ring, distance and lane of the block.
  using ByLane = uint32_t[Rings][kMaxCudaRanks][kWidest];

  struct Shared {
    // Chunks of this call that a role has completed.
    uint32_t scattered;
    uint32_t taken;
    uint32_t reduced;
    uint32_t gathered;
    uint32_t failed;
    uint32_t freed;  // chunks whose stages the stores of results have read
    ByLane room;     // chunks that may be sent in this call
    ByLane come;     // chunks of this call that have arrived
    ByLane sent;     // counts at the start of this call
    ByLane consumed;
    ptx::TransactionBarrier full[3][kMostStages];
    ptx::TransactionBarrier added[kMostStages];
  };

 public:
  __device__ __forceinline__ WideLanes(const KernelCall& call, const Patience&,
                                       const LaneArguments& lanes)
      : call_(call),
        lanes_(lanes),
        world_(call.world),
        width_(static_cast<uint32_t>(lanes.wide.lanes)),
        shift_(lanes.wide.shift) {
    const int t = static_cast<int>(threadIdx.x);
    Shared& s = shared();
    for (int at = t; at < kMaxCudaRanks * kWidest; at += kThreads) {
      const int d = at / kWidest, k = at % kWidest;
      if (d == 0 || d >= world_ || k >= lanes.wide.lanes) continue;
      const LaneCounts& own = counts(k, d);
      for (int ring = 0; ring < Rings; ++ring) {
        s.room[ring][d][k] = s.come[ring][d][k] = 0;
        s.sent[ring][d][k] = ptx::ld_relaxed_gpu(&own.sent[ring]);
        s.consumed[ring][d][k] = ptx::ld_relaxed_gpu(&own.consumed[ring]);
      }
    }
    if (t < lanes.wide.lanes) busy_ = atomicExch(busy(t), 1u);
    if (t == 0) {
      s.scattered = s.taken = s.reduced = s.gathered = s.failed = s.freed = 0;
      for (int role = 0; role < 3; ++role) {
        for (int stage = 0; stage < kMostStages; ++stage) ptx::init(&s.full[role][stage]);
      }
      for (int stage = 0; stage < kMostStages; ++stage) ptx::init(&s.added[stage], kTakes);
    }
    __syncthreads();
  }
  __device__ __forceinline__ WideLanes(const KernelCall& call, const Patience& patience,
                                       const LaneArguments& lanes, const Routes&)
      : WideLanes(call, patience, lanes) {}
  static __device__ __forceinline__ const Routes* pairs(const LaneArguments&) { return nullptr; }
  static __device__ __forceinline__ const Routes* pairs(const LaneArguments&,
                                                        const Routes& routes) {
    return &routes;
  }

  /// Runs the roles, each of which is called once, by its threads.
  template <typename Scatter, typename Take, typename Third>
  __device__ __forceinline__ void run(Patience& patience, Scatter scatter, Take take, Third third) {
    const int t = static_cast<int>(threadIdx.x);
    if (t < kScatters) return scatter(RoleThreads{t, kScatters, 1 + kScatter});
    if (t < kScatters + kTakes) {
      return take(RoleThreads{t - kScatters, kTakes, 1 + kTake});
    }
    if (t < kWatches) return third(RoleThreads{t - kScatters - kTakes, kThirds, 1 + kThird});
    if (t < kAnnounces) return watch(patience, (t - kWatches) / kWarp);
    if (Rings == 1 || t < kAnnounces + kWarp)
      return announce(patience, 0, shared().scattered, shared().taken);
    announce(patience, Rings - 1, shared().reduced, shared().gathered);
  }

  /// Chunk i of the block, in a message of `vectors` vectors.
  __device__ __forceinline__ Chunk chunk(const LaneChunks& chunks, uint32_t i,
                                         uint64_t vectors) const {
    const uint64_t number = static_cast<uint64_t>(i) * gridDim.x + blockIdx.x;
    const uint64_t first = number * chunks.vectors;
    if (i >= number_of(chunks) || first >= vectors) return {first, 0};
    const uint64_t left = vectors - first;
    return {first, static_cast<uint32_t>(left < chunks.vectors ? left : chunks.vectors)};
  }
  /// The number of chunks of the block.
  __device__ __forceinline__ uint32_t number_of(const LaneChunks& chunks) const {
    return chunks.count << shift_;
  }
  /// The number of chunks of the longest message.
  __device__ __forceinline__ uint32_t longest(const LaneChunks (&chunks)[kMaxCudaRanks]) const {
    uint32_t most = chunks[1].count;
#pragma unroll 1
    for (int d = 2; d < world_; ++d) most = max(most, chunks[d].count);
    return most << shift_;
  }

  __device__ __forceinline__ bool direct() const {
    return Rings > 1 && lanes_.output[1] != nullptr;
  }

  /// Whether chunk i may be stored into its slot at that rank, and whether chunk i of that rank has
  /// arrived.
  __device__ __forceinline__ bool has_room(int ring, int distance, uint32_t i) const {
    return ptx::ld_acquire_cta(&shared().room[ring][distance][lane_of(i)]) > i >> shift_;
  }
  __device__ __forceinline__ bool has_come(int ring, int distance, uint32_t i) const {
    return ptx::ld_acquire_cta(&shared().come[ring][distance][lane_of(i)]) > i >> shift_;
  }
  /// Waits for progress that a role or the watching threads publish. Returns false if the block has
  /// failed.
  template <typename Is>
  __device__ __forceinline__ bool await(Is is) const {
    return await_unless(&shared().failed, is);
  }
  /// The same for all threads of a role. Each of the first threads waits for one peer.
  template <typename Is>
  __device__ __forceinline__ bool await_peers(const RoleThreads& role, Is is) const {
    const int distance = role.thread + 1;
    const bool missing = distance < world_ && !await([&] { return is(distance); });
    return !ptx::bar_or(role.barrier, role.threads, missing);
  }

  /// The slot of chunk i in this rank's ring at the peer at that distance, and in that peer's ring
  /// on this rank.
  __device__ __forceinline__ Vector* slot_at(int ring, int distance, uint32_t i) const {
    const uint32_t k = lane_of(i);
    return reinterpret_cast<Vector*>(
        call_.peer[distance] +
        slot_offset(ring, world_ - distance, k, shared().sent[ring][distance][k] + (i >> shift_)));
  }
  __device__ __forceinline__ const Vector* own_slot(int ring, int distance, uint32_t i) const {
    const uint32_t k = lane_of(i);
    return reinterpret_cast<const Vector*>(
        call_.own() +
        slot_offset(ring, distance, k, shared().consumed[ring][distance][k] + (i >> shift_)));
  }

  // The progress of the roles. Called by one thread after a barrier of its role.
  __device__ __forceinline__ void scattered(uint32_t chunks) {
    ptx::st_release_cta(&shared().scattered, chunks);
  }
  __device__ __forceinline__ void taken(uint32_t chunks) {
    ptx::st_release_cta(&shared().taken, chunks);
  }
  __device__ __forceinline__ void reduced(uint32_t chunks) {
    ptx::st_release_cta(&shared().reduced, chunks);
  }
  __device__ __forceinline__ void gathered(uint32_t chunks) {
    ptx::st_release_cta(&shared().gathered, chunks);
  }
  __device__ __forceinline__ bool has_scattered(uint32_t i) const {
    return ptx::ld_acquire_cta(&shared().scattered) > i;
  }
  static __device__ __forceinline__ bool failed() { return has_failed(&shared().failed); }

  __device__ __forceinline__ Stages stages(Role role, bool reduces = false) const {
    extern __shared__ __align__(128) char dynamic[];
    const WideShape& shape = lanes_.wide;
    const uint32_t all_ranks = static_cast<uint32_t>(world_);
    uint32_t before = 0;
    if (role > kScatter) before += shape.stages[kScatter];
    if (role > kTake) before += shape.stages[kTake] * (Rings > 1 ? all_ranks : 1);
    Shared& s = shared();
    return {ptx::shared_address(dynamic) + before * shape.bytes,
            shape.bytes * (reduces ? all_ranks : 1),
            static_cast<uint32_t>(shape.stages[role]),
            s.full[role],
            s.added,
            &s.freed,
            &s.failed};
  }

  /// Whether another call uses the same lanes at the same time.
  __device__ __forceinline__ bool overlaps() const { return busy_ != 0; }

  __device__ __forceinline__ void end() const {
    const int t = static_cast<int>(threadIdx.x);
    for (int at = t; at < kMaxCudaRanks * kWidest; at += kThreads) {
      const int d = at / kWidest, k = at % kWidest;
      if (d == 0 || d >= world_ || k >= lanes_.wide.lanes) continue;
      LaneCounts& own = counts(k, d);
      ptx::red_add(&own.sent[0], lanes_.sent[d].count);
      ptx::red_add(&own.consumed[0], lanes_.received[d].count);
      if (Rings == 1) continue;
      if (!direct()) {
        ptx::red_add(&own.sent[Rings - 1], lanes_.received[d].count);
        ptx::red_add(&own.consumed[Rings - 1], lanes_.sent[d].count);
      } else if (k == 0) {
        ptx::red_add(&own.direct, 1);
      }
    }
    if (t < lanes_.wide.lanes) *reinterpret_cast<volatile uint32_t*>(busy(t)) = 0;
  }

 private:
  /// The words that a thread of a warp handles: those of one peer, for some of the lanes.
  struct Share {
    int distance;
    int first;
    int step;

    __device__ __forceinline__ explicit Share(int world) {
      const int peers = world - 1, t = static_cast<int>(threadIdx.x) % kWarp;
      step = kWarp / peers;
      distance = 1 + t % peers;
      first = t / peers < step ? t / peers : kWidest;
    }
  };

  /// Chunks that this rank sends to a peer through a ring of each lane, and chunks that it takes.
  __device__ __forceinline__ uint32_t sends(int ring, int distance) const {
    return ring == 0 ? lanes_.sent[distance].count : lanes_.received[distance].count;
  }
  __device__ __forceinline__ uint32_t takes(int ring, int distance) const {
    return ring == 0 ? lanes_.received[distance].count : lanes_.sent[distance].count;
  }

  /// Waits until all chunks have arrived and all chunks may be sent. Each thread watches one peer,
  /// so it can report which peer is missing.
  __device__ __forceinline__ void watch(Patience& patience, int ring) {
    const Share share(world_);
    if (share.first >= lanes_.wide.lanes) return;
    const int d = share.distance;
    const int rank = call_.rank_at(d, world_);
    const uint32_t to_come = takes(ring, d), to_send = sends(ring, d);
    if (ring > 0 && direct()) {
      if (share.first != 0) return;
      const uint32_t calls = ptx::ld_relaxed_gpu(&counts(0, d).direct);
      uint32_t seen = 0;
      const bool came = patience.wait(
          Phase::gather,
          [&] {
            seen = ptx::ld_acquire_sys(&words(0, rank).direct);
            return epoch_reached(seen, calls + 1) || failed();
          },
          [&] {
            return Blame{rank, calls + 1, seen, lane(0)};
          });
      if (!came) fail();
      return;
    }
    bool moved = false, differs = false;
    uint32_t least = 0;  // chunks that have arrived in a lane that is incomplete: for the report
    int late = 0;
    const auto look = [&] {
      bool complete = true;
      for (int k = share.first; k < lanes_.wide.lanes; k += share.step) {
        uint32_t& come = shared().come[ring][d][k];
        uint32_t& room = shared().room[ring][d][k];
        if (come >= to_come && room >= to_send) continue;
        const uint64_t word = ptx::ld_acquire_sys(&words(k, rank).ring[ring].word);
        const uint32_t before = shared().consumed[ring][d][k];
        const uint32_t is_come = within(static_cast<uint32_t>(word >> 32) - before, to_come);
        const uint32_t is_room =
            within(static_cast<uint32_t>(word) - shared().sent[ring][d][k] + kRingSlots, to_send);
        if (is_come > come || is_room > room) {
          moved = true;
          if (ring == 0 && come == 0 && is_come > 0) {
            differs |= !is_same_call(patience, k, d, rank, before);
          }
          // One fence here for all lanes replaces a fence by the roles for each chunk.
          ptx::fence_proxy_async();
          if (!differs) ptx::st_release_cta(&come, is_come);
          ptx::st_release_cta(&room, is_room);
        }
        if (is_come < to_come || is_room < to_send) {
          complete = false;
          least = is_come;
          late = k;
        }
      }
      return complete;
    };
    const bool came = patience.wait(
        ring > 0      ? Phase::gather
        : to_come > 0 ? Phase::arrival
                      : Phase::release,
        [&] { return look() || differs || failed(); },
        [&] {
          return Blame{rank, to_come, least, lane(late)};
        },
        [&] {
          const bool has = moved;
          moved = false;
          return has;
        });
    if (!came || differs) fail();
  }

  /// The chunks that a peer has counted in this call, at most `most`. The peer may not have begun
  /// the call yet, or may have begun the next one.
  static __device__ __forceinline__ uint32_t within(uint32_t count, uint32_t most) {
    const auto ahead = static_cast<int32_t>(count);
    return ahead < 0 ? 0 : min(static_cast<uint32_t>(ahead), most);
  }

  static __device__ __forceinline__ void fail() {
    *const_cast<volatile uint32_t*>(&shared().failed) = 1;
  }

  /// Announces to each peer the chunks stored into its rings and the chunks consumed from this
  /// rank's rings, for all lanes after one fence.
  __device__ __forceinline__ void announce(const Patience& patience, int ring,
                                           const uint32_t& stored, const uint32_t& used) {
    const Share share(world_);
    if (share.first >= lanes_.wide.lanes) return;
    const int d = share.distance;
    const uint32_t to_send = sends(ring, d), to_take = takes(ring, d);
    const uint32_t all_sent = longest(ring == 0 ? lanes_.sent : lanes_.received);
    const uint32_t all_taken = longest(ring == 0 ? lanes_.received : lanes_.sent);
    if (ring > 0 && direct()) {
      if (share.first != 0) return;
      const uint32_t calls = ptx::ld_relaxed_gpu(&counts(0, d).direct);
      if (await([&] { return ptx::ld_acquire_cta(&stored) >= all_sent; })) {
        ptx::st_release_sys(&words_at(0, d).direct, calls + 1);
      }
      return;
    }
    const auto word = [&](int k, uint32_t sent, uint32_t consumed) {
      return static_cast<uint64_t>(shared().sent[ring][d][k] + min(sent, to_send)) << 32 |
             (shared().consumed[ring][d][k] + min(consumed, to_take));
    };
    const auto store = [&](int k, uint64_t value) {
      ptx::st_relaxed_sys(&words_at(k, d).ring[ring].word, value);
    };
    if (patience.alive()) {
      for (int k = share.first; k < lanes_.wide.lanes; k += share.step) store(k, word(k, 0, 0));
    }
    uint32_t announced = 0, announced_used = 0;
    while (announced < all_sent || announced_used + (kRingSlots / 2 << shift_) < all_taken) {
      const uint32_t is_stored = ptx::ld_acquire_cta(&stored);
      const uint32_t is_used = ptx::ld_acquire_cta(&used);
      if (failed()) return;
      if (is_stored == announced && is_used == announced_used) continue;
      if (ring == 0) {
        for (int k = share.first; k < lanes_.wide.lanes; k += share.step) {
          // The mark names the call of the first chunk. The chunk's slot is free, and therefore its
          // mark is too.
          if (of_lane(announced, k) > 0 || of_lane(is_stored, k) == 0 || to_send == 0) continue;
          ptx::st_relaxed_sys(&words_at(k, d).fingerprint[shared().sent[0][d][k] % kRingSlots],
                              lanes_.fingerprint[d]);
        }
      }
      ptx::fence_acq_rel_sys();
      for (int k = share.first; k < lanes_.wide.lanes; k += share.step) {
        const uint64_t next = word(k, of_lane(is_stored, k), of_lane(is_used, k));
        if (next != word(k, of_lane(announced, k), of_lane(announced_used, k))) store(k, next);
      }
      announced = is_stored;
      announced_used = is_used;
    }
  }

  /// How many of the first `chunks` chunks of the block belong to lane k.
  __device__ __forceinline__ uint32_t of_lane(uint32_t chunks, int k) const {
    return (chunks + width_ - 1 - static_cast<uint32_t>(k)) >> shift_;
  }
  __device__ __forceinline__ uint32_t lane_of(uint32_t i) const { return i & (width_ - 1); }

  __device__ __forceinline__ bool is_same_call(Patience& patience, int k, int distance, int rank,
                                               uint32_t before) const {
    const uint32_t own = lanes_.fingerprint[distance];
    const uint32_t mark = ptx::ld_relaxed_sys(&words(k, rank).fingerprint[before % kRingSlots]);
    if (mark == own) return true;
    patience.fail(Failure::mismatch, Phase::arrival, Blame{rank, own, mark, lane(k)});
    return false;
  }

  static __device__ __forceinline__ Shared& shared() {
    __shared__ Shared all;
    return all;
  }

  static __device__ __forceinline__ int lane(int k) {
    return static_cast<int>(blockIdx.x + static_cast<uint32_t>(k) * gridDim.x);
  }
  __device__ __forceinline__ LaneWords& words(int k, int rank) const {
    return reinterpret_cast<LaneWords*>(call_.own() +
                                        lanes_.area.words)[lane(k) * kMaxCudaRanks + rank];
  }
  __device__ __forceinline__ LaneWords& words_at(int k, int distance) const {
    return reinterpret_cast<LaneWords*>(call_.peer[distance] +
                                        lanes_.area.words)[lane(k) * kMaxCudaRanks + call_.rank];
  }
  __device__ __forceinline__ LaneCounts& counts(int k, int distance) const {
    return reinterpret_cast<LaneCounts*>(
        call_.own() +
        lanes_.area.counts)[lane(k) * kMaxCudaRanks + call_.rank_at(distance, world_)];
  }
  __device__ __forceinline__ uint32_t* busy(int k) const {
    return reinterpret_cast<uint32_t*>(call_.own() + lanes_.area.busy) + lane(k);
  }
  __device__ __forceinline__ uint64_t slot_offset(int ring, int distance, uint32_t k,
                                                  uint32_t place) const {
    return lanes_.area.ring(world_, ring, static_cast<uint32_t>(lane(static_cast<int>(k))),
                            distance) +
           place % kRingSlots * lanes_.area.slot_bytes;
  }

  const KernelCall& call_;
  const LaneArguments& lanes_;
  const int world_;
  const uint32_t width_;
  const int shift_;
  uint32_t busy_ = 0;
};

}  // namespace collx::cuda
