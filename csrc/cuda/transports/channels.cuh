// Channels: messages between pairs of ranks. Some pairs may exchange nothing.
//
// MEMORY LAYOUT  protocol/cuda_layout.h: ChannelArea. Each ordered pair of ranks has, for each
// tile, two slots at the receiver, and a count of uses on both ranks.
// MEMORY SEMANTICS  Words carry their own arrival, as in wire.cuh. Before the sender writes the
// same slot again, two uses later, it reads its done word with ld.acquire.sys. The receiver stores
// the done word with st.release.sys after a bar.sync, so that everything that the block has read
// and re-armed comes before it. For the last use of a call, the receiver stores the done word in
// the next call, where the kernel boundary has already ordered these accesses. Thus the pair needs
// no word in the other direction, and a pair that exchanges nothing stays untouched.
// USAGE  A use: send to all, hand_back() in the first use, take from all, finish_use(). Both ranks
// know the length of the message.
#pragma once

#include "../../protocol/uses.h"
#include "session.cuh"
#include "wire.cuh"

namespace collx::cuda {

/// The counts of a tile for each rank. They are adjacent, so one load reads four of them.
template <int Ranks>
struct Counts {
  uint32_t of[(Ranks + 3) / 4 * 4];

  static __device__ __forceinline__ Counts load(const uint32_t* row) {
    return load_by(row, [](const Vector* four) { return ptx::ld_here(four); });
  }
  static __device__ __forceinline__ Counts load_acquire(const uint32_t* row) {
    return load_by(row, [](const Vector* four) { return ptx::ld_acquire_sys(four); });
  }

  /// Selects the count without an address: registers have none.
  __device__ __forceinline__ uint32_t operator[](int rank) const {
    uint32_t count = of[0];
#pragma unroll
    for (int r = 1; r < Ranks; ++r) count = r == rank ? of[r] : count;
    return count;
  }

 private:
  template <typename Load>
  static __device__ __forceinline__ Counts load_by(const uint32_t* row, Load load_four) {
    Counts counts;
#pragma unroll
    for (int q = 0; q < (Ranks + 3) / 4; ++q) {
      const Vector v = load_four(reinterpret_cast<const Vector*>(row) + q);
#pragma unroll
      for (int i = 0; i < 4; ++i) counts.of[4 * q + i] = v.word[i];
    }
    return counts;
  }
};

/// The channels of the tiles that this block serves. Vector i of a use belongs to tile
/// i / kTileVectors; every message is a whole number of warps' vectors.
///
/// In a simple call a thread has one tile, whose counts are loaded at construction and kept.
template <int Ranks, bool Simple>
class Channels : public Transport {
 public:
  static constexpr bool kSimple = Simple;
  static constexpr bool kWhole = Simple;    // all messages are whole vectors
  static constexpr bool kTakesOwn = false;  // take() includes this rank's own vector
  static constexpr int kRanks = Ranks;
  static __device__ __forceinline__ const Routes* pairs(const Routes& routes) { return &routes; }

  __device__ __forceinline__ Channels(const KernelCall& call, const Patience& patience,
                                      const Routes& routes)
      : Channels(call, patience, routes, call.vectors, routes) {}

  /// `vectors`: the length of the longest message on the wire. `frame`: belongs to the routes,
  /// which may be laid out later. In a simple call, no message is longer than call.vectors.
  __device__ __forceinline__ Channels(const KernelCall& call, const Patience&, const Routes& routes,
                                      uint64_t vectors, const RouteFrame& frame)
      : call_(call), routes_(routes), frame_(frame) {
    if constexpr (Simple) {
      if (first() < round_up<uint64_t>(call.vectors, kTileVectors)) {
        sent_ = Counts<Ranks>::load(row(frame_.uses_sent, first()));
        received_ = Counts<Ranks>::load(row(frame_.uses_received, first()));
      }
    }
    extend(vectors);
  }

  /// Extends the range to messages that turn out to be longer than those known so far.
  __device__ __forceinline__ void extend(uint64_t vectors) {
    if (vectors <= vectors_) return;
    const uint32_t marked = used();
    vectors_ = vectors;
    mark_tiles(marked);
  }

  /// Calls f for each vector of a use that belongs to this thread.
  template <typename F>
  __device__ __forceinline__ void for_own(F f) const {
    if constexpr (Simple) {
      if (first() < used()) f(first());
    } else {
      for (uint32_t i = first(); i < used(); i += stride()) f(i);
    }
  }

  /// Whether a message reaches vector i of the use. The same for all lanes of a warp.
  __device__ __forceinline__ bool reaches(const Message& m, uint32_t use, uint32_t i) const {
    return (Simple ? i : uint64_t{use} * call_.capacity + i) < m.wire;
  }

  /// The number of uses before this call, for the channels to and from each rank.
  __device__ __forceinline__ Counts<Ranks> sent(uint32_t i) const {
    return Simple ? sent_ : Counts<Ranks>::load(row(frame_.uses_sent, i));
  }
  __device__ __forceinline__ Counts<Ranks> received(uint32_t i) const {
    return Simple ? received_ : Counts<Ranks>::load(row(frame_.uses_received, i));
  }
  /// The number of uses that the receivers have finished.
  __device__ __forceinline__ Counts<Ranks> done(uint32_t i) const {
    return Counts<Ranks>::load_acquire(row(frame_.uses_done, i));
  }

  /// Waits until `peer` has finished the use two before `epoch`. `seen`: a done word loaded
  /// earlier, which may already suffice.
  __device__ __forceinline__ bool writable(Patience& patience, int peer, uint32_t i, uint32_t epoch,
                                           uint32_t seen) const {
    const uint32_t* word = row(frame_.uses_done, i) + peer;
    return patience.wait(
        Phase::release,
        [&] {
          const bool reached = epoch_reached(seen, epoch - 2);
          if (!reached) seen = ptx::ld_acquire_sys(word);
          return reached;
        },
        [&] {
          return Blame{peer, epoch - 2, seen};
        });
  }

  /// Announces to the senders of this call's messages that the slots of earlier calls have been
  /// read and re-armed. Called in the first use, when all messages to this rank are known.
  __device__ __forceinline__ void hand_back(const Patience& patience) const {
    tell(patience, 0, [](uint32_t* word, uint32_t before) { ptx::st_relaxed_sys(word, before); });
  }

  /// Ends one of `uses` uses; called by all threads of the block. It announces the end to the
  /// senders whose messages have another use. The next call announces the last use, which saves a
  /// fence.
  __device__ __forceinline__ void finish_use(const Patience& patience, uint32_t use,
                                             uint32_t uses) const {
    if (Simple || use + 1 >= uses) return;
    __syncthreads();
    tell(patience, use + 1,
         [=](uint32_t* word, uint32_t before) { ptx::st_release_sys(word, before + use + 1); });
  }

  __device__ __forceinline__ bool overlaps() const { return marks_ != 0; }

  /// Adds the uses of this call to the counts.
  __device__ __forceinline__ void end() const {
    const int peer = static_cast<int>(threadIdx.x % kTileVectors);
    if (peer >= call_.world) return;
    const int d = call_.distance_to(peer, call_.world);
    for_own_tiles([&](uint32_t i) {
      const uint32_t tile = i - i % kTileVectors;
      if (peer != call_.rank) {
        uint32_t *sent = row(frame_.uses_sent, i), *received = row(frame_.uses_received, i);
        sent[peer] = (Simple ? sent_[peer] : sent[peer]) + uses(routes_.from[d], tile);
        received[peer] = (Simple ? received_[peer] : received[peer]) + uses(routes_.to[d], tile);
      }
      if (leads()) call_.entries[i / kTileVectors].busy = 0;
    });
  }

  /// The number of uses of the longest message; one if there is no message.
  __device__ __forceinline__ uint32_t all_uses() const {
    return vectors_ == 0 ? 1 : Uses(vectors_, call_.capacity).all();
  }

 private:
  /// Marks the tiles that begin at or after vector `from` of a use as busy. A call with one tile
  /// for each thread reads the old mark only at its end, so that nothing waits for it.
  __device__ __forceinline__ void mark_tiles(uint32_t from) {
    if (!leads()) return;
    const auto mark = [&](uint32_t i) {
      return atomicExch(&call_.entries[i / kTileVectors].busy, 1u);
    };
    if (first() >= from && serves(first())) marks_ = mark(first());
    if constexpr (!Simple) {
      for (uint32_t i = first() + stride(); serves(i); i += stride()) {
        if (i >= from) marks_ |= mark(i);
      }
    }
  }

  /// Calls store(done word, uses before this call), in one thread of each tile, for each sender
  /// whose message reaches into that use.
  template <typename Store>
  __device__ __forceinline__ void tell(const Patience& patience, uint32_t use, Store store) const {
    const int source = static_cast<int>(threadIdx.x % kTileVectors);
    if (source >= call_.world || source == call_.rank || !patience.alive()) return;
    const int d = call_.distance_to(source, call_.world);
    for_own_tiles([&](uint32_t i) {
      const uint32_t tile = i - i % kTileVectors;
      if (!reaches(routes_.to[d], use, tile)) return;
      uint32_t* word = reinterpret_cast<uint32_t*>(call_.peer[d] + frame_.done_offset) +
                       tile / kTileVectors * kMaxCudaRanks + call_.rank;
      store(word, Simple ? received_[source] : row(frame_.uses_received, i)[source]);
    });
  }

  template <typename F>
  __device__ __forceinline__ void for_own_tiles(F f) const {
    // A tile still belongs to the block if a message covers less than one warp's vectors of it.
    if constexpr (Simple) {
      if (serves(first())) f(first());
    } else {
      for (uint32_t i = first(); serves(i); i += stride()) f(i);
    }
  }
  /// The vectors of the first use.
  __device__ __forceinline__ uint32_t used() const {
    return Simple || vectors_ < call_.capacity ? static_cast<uint32_t>(vectors_) : call_.capacity;
  }
  __device__ __forceinline__ bool serves(uint32_t i) const {
    return i / kTileVectors * kTileVectors < used();
  }

  /// The number of uses that a message makes of the tile that begins at vector `tile` of a use.
  __device__ __forceinline__ uint32_t uses(const Message& m, uint32_t tile) const {
    if (m.wire <= tile) return 0;
    if (Simple) return 1;
    return static_cast<uint32_t>(ceil_div<uint64_t>(m.wire - tile, call_.capacity));
  }

  __device__ __forceinline__ uint32_t* row(uint32_t* table, uint32_t i) const {
    return table + i / kTileVectors * kMaxCudaRanks;
  }
  __device__ bool leads() const { return threadIdx.x % kTileVectors == 0; }
  __device__ uint32_t first() const { return blockIdx.x * blockDim.x + threadIdx.x; }
  __device__ uint32_t stride() const { return gridDim.x * blockDim.x; }

  const KernelCall& call_;
  const Routes& routes_;
  const RouteFrame& frame_;
  uint64_t vectors_ = 0;
  Counts<Ranks> sent_, received_;
  uint32_t marks_ = 0;
};

}  // namespace collx::cuda
