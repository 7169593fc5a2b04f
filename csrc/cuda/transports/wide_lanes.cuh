// Lanes for calls with few blocks: a block serves several of them, and copies through shared
// memory.
//
// One lane has room for less than a link holds while a chunk is announced, taken and told, so few
// blocks with one lane each leave the link idle. Here the chunks of a block go to its lanes in
// turn: chunk i is chunk i / n of lane i % n of n. The rings, words and counts are those of
// lanes.cuh, and so is what they mean: to the other calls of the communicator this one is a call
// with more blocks.
//
// ROLES  One scatters, one takes, one gathers results or copies what stays on this rank. One warp
// for each ring watches the words that the peers store, a thread for each word, and publishes in
// shared memory what has come; one tells them. So a role never waits for a load from memory to
// learn whether it may go on.
//
// BULK  A role is one thread that moves whole chunks through stages of shared memory, by bulk
// copies; for a reduction its other threads add up what lies in a stage. Otherwise, where tensors
// are not whole vectors in one run, the threads of a role move vectors as in lanes.cuh.
//
// MEMORY SEMANTICS  The watching thread loads a word with acquire.sys and stores what it says in
// shared memory with release.cta, from where a role loads it with acquire.cta. Between the two it
// fences the async proxy, in which bulk copies read a slot or overwrite one. A role publishes a
// chunk as stored when the bulk stores have arrived (wait_stored, never wait_read), and as consumed
// when it is in shared memory. The telling warp loads that with acquire.cta, and stores the words
// behind one fence.acq_rel.sys for all lanes.
//
// CREDIT  All that is consumed is told when it is, but for the last chunks of a lane, which the
// next call tells. A role publishes all that it has stored before it waits for credit.
//
// FAILURE  As in lanes.cuh. Only the watching threads wait for peers, and each of their waits is
// bounded; every other wait ends when they mark the block as failed. Bulk copies that are on their
// way end by themselves, and their thread waits for that: a block that left would leave its shared
// memory to the next one.
#pragma once

#include "../ptx/bulk.cuh"
#include "lanes.cuh"

namespace collx::cuda {

template <int Rings>
class WideLanes : public Transport {
 public:
  static constexpr int kScatters = 64, kTakes = 128, kThirds = 64;  // threads of the roles

 private:
  static constexpr int kWarp = kWarpLanes;
  static constexpr int kWatches = kScatters + kTakes + kThirds;  // the first thread of those
  static constexpr int kTells = kWatches + Rings * kWarp;
  static constexpr int kMostStages = 16;
  // Groups of stores that may be on their way when earlier ones are published.
  static constexpr int kPublished = 6;

 public:
  static constexpr int kThreads = kTells + Rings * kWarp;
  enum Role : uint32_t { kScatter, kTake, kThird };

 private:
  /// By ring, distance and lane of the block.
  using ByLane = uint32_t[Rings][kMaxCudaRanks][kWidest];

  struct Shared {
    // Chunks of this call that a role is done with.
    uint32_t scattered;
    uint32_t taken;
    uint32_t reduced;
    uint32_t gathered;
    uint32_t failed;
    uint32_t freed;  // chunks whose stages the stores of results have read
    ByLane room;     // chunks that may be sent in this call
    ByLane come;     // chunks of it that have come
    ByLane sent;     // counts at its start
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
    if (t < kTells) return watch(patience, (t - kWatches) / kWarp);
    if (Rings == 1 || t < kTells + kWarp)
      return tell(patience, 0, shared().scattered, shared().taken);
    tell(patience, Rings - 1, shared().reduced, shared().gathered);
  }

  /// Chunk i of the block, of a message of `vectors`.
  __device__ __forceinline__ Chunk chunk(const LaneChunks& chunks, uint32_t i,
                                         uint64_t vectors) const {
    const uint64_t number = static_cast<uint64_t>(i) * gridDim.x + blockIdx.x;
    const uint64_t first = number * chunks.vectors;
    if (i >= number_of(chunks) || first >= vectors) return {first, 0};
    const uint64_t left = vectors - first;
    return {first, static_cast<uint32_t>(left < chunks.vectors ? left : chunks.vectors)};
  }
  /// Chunks of the block.
  __device__ __forceinline__ uint32_t number_of(const LaneChunks& chunks) const {
    return chunks.count << shift_;
  }
  /// Of the longest message.
  __device__ __forceinline__ uint32_t longest(const LaneChunks (&chunks)[kMaxCudaRanks]) const {
    uint32_t most = chunks[1].count;
#pragma unroll 1
    for (int d = 2; d < world_; ++d) most = max(most, chunks[d].count);
    return most << shift_;
  }

  __device__ __forceinline__ bool direct() const {
    return Rings > 1 && lanes_.output[1] != nullptr;
  }

  /// Whether chunk i to that rank may go into its slot, and whether that of the rank has come.
  __device__ __forceinline__ bool has_room(int ring, int distance, uint32_t i) const {
    return ptx::ld_acquire_cta(&shared().room[ring][distance][lane_of(i)]) > i >> shift_;
  }
  __device__ __forceinline__ bool has_come(int ring, int distance, uint32_t i) const {
    return ptx::ld_acquire_cta(&shared().come[ring][distance][lane_of(i)]) > i >> shift_;
  }
  /// Waits for something that a role or the watching threads publish. False, if something failed.
  template <typename Is>
  __device__ __forceinline__ bool await(Is is) const {
    while (!is()) {
      if (failed()) return false;
    }
    return !failed();
  }
  /// The same by all threads of a role, of which each of the first waits for a peer.
  template <typename Is>
  __device__ __forceinline__ bool await_peers(const RoleThreads& role, Is is) const {
    const int distance = role.thread + 1;
    const bool missing = distance < world_ && !await([&] { return is(distance); });
    return !ptx::bar_or(role.barrier, role.threads, missing);
  }

  /// Where chunk i goes in this rank's ring at the peer at that distance, and where it stands in
  /// that peer's ring here.
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

  // What the roles are done with. By one thread, for all that have met at a barrier.
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
  static __device__ __forceinline__ bool failed() {
    return *const_cast<volatile uint32_t*>(&shared().failed) != 0;
  }

  /// The stages of a role in shared memory, as its thread goes through them.
  struct Stages {
    uint32_t memory;  // address of the first in shared memory
    uint32_t bytes;   // of each
    uint32_t count;
    ptx::TransactionBarrier* full;

    __device__ __forceinline__ uint32_t of(uint32_t stage) const { return memory + stage * bytes; }
    /// Stores that may still read their stages when the next load begins. So many stages less are
    /// loaded ahead.
    __device__ __forceinline__ uint32_t held() const { return count < 5 ? 1 : 2; }
    __device__ __forceinline__ bool are_free(uint32_t loaded, uint32_t done) const {
      return loaded - done + held() < count;
    }
    /// Until the stage is read that is loaded next.
    __device__ __forceinline__ void wait_free() const {
      if (held() == 1) return ptx::wait_read<1>();
      ptx::wait_read<2>();
    }
  };
  __device__ __forceinline__ Stages stages(Role role, bool reduces = false) const {
    extern __shared__ __align__(128) char dynamic[];
    const WideShape& shape = lanes_.wide;
    const uint32_t all_ranks = static_cast<uint32_t>(world_);
    uint32_t before = 0;
    if (role > kScatter) before += shape.stages[kScatter];
    if (role > kTake) before += shape.stages[kTake] * (Rings > 1 ? all_ranks : 1);
    return {ptx::shared_address(dynamic) + before * shape.bytes,
            shape.bytes * (reduces ? all_ranks : 1), static_cast<uint32_t>(shape.stages[role]),
            shared().full[role]};
  }

  /// Moves `n` items through stages, by one thread. `load(x, to, barrier)` starts the load of item
  /// x, for which can_load(x) has been true. When it is there, `landed(x)`; then, when can_store(x)
  /// is true, `store(x, from)`. `stored(x)`: the first x have arrived.
  template <bool Announces, typename CanLoad, typename Load, typename Landed, typename CanStore,
            typename Store, typename Stored>
  __device__ __forceinline__ void pump(const Stages& stages, uint32_t n, CanLoad can_load,
                                       Load load, Landed landed, CanStore can_store, Store store,
                                       Stored stored) const {
    uint32_t loaded = 0, done = 0, in = 0, out = 0, parity = 0;
    const auto next = [&] {
      ++done;
      if (++out == stages.count) out = 0, parity ^= 1;
    };
    ptx::fence_proxy_async();
    while (done < n) {
      if (loaded < n && stages.are_free(loaded, done) && can_load(loaded)) {
        stages.wait_free();
        load(loaded, stages.of(in), &stages.full[in]);
        ++loaded;
        if (++in == stages.count) in = 0;
        continue;
      }
      if (loaded == done) {
        if (failed()) break;
        continue;
      }
      wait_loaded(&stages.full[out], parity);
      landed(done);
      if (!can_store(done)) {
        if (Announces) {
          ptx::wait_stored<0>();
          stored(done);
        }
        if (!await([&] { return can_store(done); })) break;
      }
      if (failed()) break;
      store(done, stages.of(out));
      ptx::commit_stores();
      next();
      if (Announces && done > kPublished) {
        ptx::wait_stored<kPublished>();
        stored(done - kPublished);
      }
    }
    const bool all = done == n;
    while (done < loaded) {
      wait_loaded(&stages.full[out], parity);
      next();
    }
    ptx::wait_stored<0>();
    if (Announces && all) stored(n);
  }

  // A reduction of n chunks in stages has three parts, which wait for each other by barriers and
  // counts: one thread loads, the threads of a role add up, and another thread stores the results.

  /// load(x, to, barrier) starts the loads of chunk x, for which can_load(x) has been true.
  template <typename CanLoad, typename Load>
  __device__ __forceinline__ void load_all(const Stages& stages, uint32_t n, CanLoad can_load,
                                           Load load) const {
    uint32_t loaded = 0, in = 0, parity = 0;
    ptx::fence_proxy_async();
    for (; loaded < n; ++loaded) {
      const auto may = [&] {
        return loaded < ptx::ld_acquire_cta(&shared().freed) + stages.count && can_load(loaded);
      };
      if (!await(may)) break;
      load(loaded, stages.of(in), &stages.full[in]);
      if (++in == stages.count) in = 0, parity ^= 1;
    }
    // Where the call has failed, nobody else waits for what is on its way.
    for (uint32_t left = min(loaded, stages.count); left > 0; --left) {
      if (in == 0) in = stages.count, parity ^= 1;
      wait_loaded(&stages.full[--in], parity);
    }
  }

  /// add(stage, x) by each thread of the role, for its share of chunk x.
  template <typename Add>
  __device__ __forceinline__ void add_all(const Stages& stages, uint32_t n, Add add) const {
    uint32_t at = 0, parity = 0;
    for (uint32_t x = 0; x < n; ++x) {
      while (!ptx::has_ended(&stages.full[at], parity)) {
        if (failed()) return;
      }
      add(stages.of(at), x);
      ptx::fence_proxy_async_shared();
      ptx::arrive(&shared().added[at]);
      if (++at == stages.count) at = 0, parity ^= 1;
    }
  }

  /// As in pump(), of what has been added up.
  template <typename Landed, typename CanStore, typename Store, typename Stored>
  __device__ __forceinline__ void store_all(const Stages& stages, uint32_t n, Landed landed,
                                            CanStore can_store, Store store, Stored stored) const {
    uint32_t at = 0, parity = 0, x = 0;
    for (; x < n; ++x) {
      if (!await([&] { return ptx::has_ended(&shared().added[at], parity); })) break;
      landed(x);
      if (!can_store(x)) {
        ptx::wait_stored<0>();
        stored(x);
        if (!await([&] { return can_store(x); })) break;
      }
      store(x, stages.of(at));
      ptx::commit_stores();
      ptx::wait_read<1>();
      ptx::st_release_cta(&shared().freed, x);
      if (x >= kPublished) {
        ptx::wait_stored<kPublished>();
        stored(x + 1 - kPublished);
      }
      if (++at == stages.count) at = 0, parity ^= 1;
    }
    ptx::wait_stored<0>();
    if (x == n) stored(n);
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
  /// The words of which a thread of a warp takes care: those of one peer, of some of the lanes.
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

  static __device__ __forceinline__ void wait_loaded(ptx::TransactionBarrier* barrier,
                                                     uint32_t parity) {
    while (!ptx::has_ended(barrier, parity)) {
    }
  }

  /// What this rank sends to a peer in a ring, of each lane, and what it takes.
  __device__ __forceinline__ uint32_t sends(int ring, int distance) const {
    return ring == 0 ? lanes_.sent[distance].count : lanes_.received[distance].count;
  }
  __device__ __forceinline__ uint32_t takes(int ring, int distance) const {
    return ring == 0 ? lanes_.received[distance].count : lanes_.sent[distance].count;
  }

  /// Waits until all has come that is to come, and until all may be sent that is to be. Each thread
  /// takes one peer, so that it can tell which of them is missing.
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
    uint32_t least = 0;  // of what is missing: for the report
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
          // Here once for all lanes, and not by the roles for each chunk.
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

  /// What a peer has counted in this call, of at most so many. It may not have come to the call
  /// yet, and may have begun the next one.
  static __device__ __forceinline__ uint32_t within(uint32_t count, uint32_t most) {
    const auto ahead = static_cast<int32_t>(count);
    return ahead < 0 ? 0 : min(static_cast<uint32_t>(ahead), most);
  }

  static __device__ __forceinline__ void fail() {
    *const_cast<volatile uint32_t*>(&shared().failed) = 1;
  }

  /// Tells each peer what has been stored into its rings and consumed of its own, of all lanes
  /// behind one fence.
  __device__ __forceinline__ void tell(const Patience& patience, int ring, const uint32_t& stored,
                                       const uint32_t& used) {
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
    uint32_t told = 0, told_used = 0;
    while (told < all_sent || told_used + (kRingSlots / 2 << shift_) < all_taken) {
      const uint32_t is_stored = ptx::ld_acquire_cta(&stored);
      const uint32_t is_used = ptx::ld_acquire_cta(&used);
      if (failed()) return;
      if (is_stored == told && is_used == told_used) continue;
      if (ring == 0) {
        for (int k = share.first; k < lanes_.wide.lanes; k += share.step) {
          // Which call the first chunk is of. Its slot is free, and so is the place of this mark.
          if (of_lane(told, k) > 0 || of_lane(is_stored, k) == 0 || to_send == 0) continue;
          ptx::st_relaxed_sys(&words_at(k, d).fingerprint[shared().sent[0][d][k] % kRingSlots],
                              lanes_.fingerprint[d]);
        }
      }
      ptx::fence_acq_rel_sys();
      for (int k = share.first; k < lanes_.wide.lanes; k += share.step) {
        const uint64_t next = word(k, of_lane(is_stored, k), of_lane(is_used, k));
        if (next != word(k, of_lane(told, k), of_lane(told_used, k))) store(k, next);
      }
      told = is_stored;
      told_used = is_used;
    }
  }

  /// Of the first chunks of the block, those of a lane.
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
