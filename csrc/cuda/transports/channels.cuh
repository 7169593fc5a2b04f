// Channels: messages between pairs of which some exchange nothing.
//
// MEMORY LAYOUT  protocol/cuda_layout.h: ChannelArea. Each ordered pair of ranks has, for each
// tile, two slots at the receiver, and a count of uses at both ends.
// MEMORY SEMANTICS  Words carry their own arrival, as in wire.cuh. Before it writes the same slot
// again, two uses later, the sender looks with ld.acquire.sys at its done word. The receiver stores
// that behind bar.sync with st.release.sys, so that everything that the block read and re-armed
// comes before; for the last use of a call it does so in the next call, where the kernel boundary
// has ordered that already. So no word in the other direction is needed, and a pair that exchanges
// nothing stays untouched.
// USAGE  A use: send to all, in the first one hand_back(), take from all, finish_use(); both ends
// know the message's length.
#pragma once

#include "../../protocol/uses.h"
#include "session.cuh"
#include "wire.cuh"

namespace collx::cuda {

/// A tile's counts for each rank, which stand side by side: one load for four of them.
template <int Ranks>
struct Counts {
  uint32_t of[(Ranks + 3) / 4 * 4];

  static __device__ __forceinline__ Counts load(const uint32_t* row) {
    return load_by(row, [](const Vector* four) { return ptx::ld_here(four); });
  }
  static __device__ __forceinline__ Counts load_acquire(const uint32_t* row) {
    return load_by(row, [](const Vector* four) { return ptx::ld_acquire_sys(four); });
  }

  /// Without an address: registers have none.
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
/// In a simple call a thread has one tile. `Keeps`: the counts of a thread's first tile are loaded
/// at once and kept.
template <int Ranks, bool Simple, bool Keeps = Simple>
class Channels : public Transport {
 public:
  static constexpr bool kSimple = Simple;
  static constexpr int kRanks = Ranks;
  static __device__ __forceinline__ const Routes* pairs(const Routes& routes) { return &routes; }

  __device__ __forceinline__ Channels(const KernelCall& call, const Patience& patience,
                                      const Routes& routes)
      : Channels(call, patience, routes, call.vectors, routes) {}

  /// `vectors`: on the wire, of the longest message. `frame`: of the routes, which may be laid out
  /// later.
  __device__ __forceinline__ Channels(const KernelCall& call, const Patience&, const Routes& routes,
                                      uint64_t vectors, const RouteFrame& frame)
      : call_(call), routes_(routes), frame_(frame) {
    if constexpr (Keeps) {
      if (first() < (Simple ? round_up<uint64_t>(vectors, kTileVectors) : call.capacity)) {
        sent_ = Counts<Ranks>::load(row(frame_.uses_sent, first()));
        received_ = Counts<Ranks>::load(row(frame_.uses_received, first()));
      }
    }
    extend(vectors);
  }

  /// For messages that turn out to be longer than all that were known.
  __device__ __forceinline__ void extend(uint64_t vectors) {
    if (vectors <= vectors_) return;
    const uint32_t marked = used_;
    vectors_ = vectors;
    used_ = Simple || vectors < call_.capacity ? static_cast<uint32_t>(vectors) : call_.capacity;
    mark_tiles(marked);
  }

  /// Calls f with each vector of a use that is this thread's.
  template <typename F>
  __device__ __forceinline__ void for_own(F f) const {
    if constexpr (Simple) {
      if (first() < used_) f(first());
    } else {
      for (uint32_t i = first(); i < used_; i += stride()) f(i);
    }
  }

  /// Whether a message reaches vector i of the use. The same for all lanes of a warp.
  __device__ __forceinline__ bool reaches(const Message& m, uint32_t use, uint32_t i) const {
    return (Simple ? i : uint64_t{use} * call_.capacity + i) < m.wire;
  }

  /// Uses before this call, of the channels to and from each rank.
  __device__ __forceinline__ Counts<Ranks> sent(uint32_t i) const {
    return keeps(i) ? sent_ : Counts<Ranks>::load(row(frame_.uses_sent, i));
  }
  __device__ __forceinline__ Counts<Ranks> received(uint32_t i) const {
    return keeps(i) ? received_ : Counts<Ranks>::load(row(frame_.uses_received, i));
  }
  /// Uses that the receivers have finished.
  __device__ __forceinline__ Counts<Ranks> done(uint32_t i) const {
    return Counts<Ranks>::load_acquire(row(frame_.uses_done, i));
  }

  /// Waits until `peer` is done with the use two before `epoch`, of which `seen` may tell already.
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

  /// Tells the senders of this call's messages that what earlier calls took is read and armed
  /// again. In the first use, when all that come are known.
  __device__ __forceinline__ void hand_back(const Patience& patience) const {
    tell(patience, 0, [](uint32_t* word, uint32_t before) { ptx::st_relaxed_sys(word, before); });
  }

  /// Ends a use, by all threads of the block: tells the senders of those messages that have another
  /// one. Of `uses`; that of the last one costs a fence less in the next call.
  __device__ __forceinline__ void finish_use(const Patience& patience, uint32_t use,
                                             uint32_t uses) const {
    if (Simple || use + 1 >= uses) return;
    __syncthreads();
    tell(patience, use + 1,
         [=](uint32_t* word, uint32_t before) { ptx::st_release_sys(word, before + use + 1); });
  }

  __device__ __forceinline__ bool overlaps() const { return (first_mark_ | other_marks_) != 0; }

  /// Counts the uses.
  __device__ __forceinline__ void end() const {
    const int peer = static_cast<int>(threadIdx.x % kTileVectors);
    if (peer >= call_.world) return;
    const int d = call_.distance_to(peer, call_.world);
    for_own_tiles([&](uint32_t i) {
      const uint32_t tile = i - i % kTileVectors;
      if (peer != call_.rank) {
        uint32_t *sent = row(frame_.uses_sent, i), *received = row(frame_.uses_received, i);
        sent[peer] = (keeps(i) ? sent_[peer] : sent[peer]) + uses(routes_.from[d], tile);
        received[peer] = (keeps(i) ? received_[peer] : received[peer]) + uses(routes_.to[d], tile);
      }
      if (leads()) call_.entries[i / kTileVectors].busy = 0;
    });
  }

  /// Of the longest message; one, where there is none.
  __device__ __forceinline__ uint32_t all_uses() const {
    return vectors_ == 0 ? 1 : Uses(vectors_, call_.capacity).all();
  }

 private:
  /// Whether the counts of vector i's tile are kept.
  __device__ __forceinline__ bool keeps(uint32_t i) const {
    return Simple || (Keeps && i == first());
  }

  /// As busy: those that begin at vector `from` of a use, or behind it. The first tile's answer is
  /// looked at when the call ends, so that nothing waits for it.
  __device__ __forceinline__ void mark_tiles(uint32_t from) {
    if (!leads()) return;
    const auto mark = [&](uint32_t i) {
      return atomicExch(&call_.entries[i / kTileVectors].busy, 1u);
    };
    if (first() >= from && serves(first())) first_mark_ = mark(first());
    if constexpr (!Simple) {
      for (uint32_t i = first() + stride(); serves(i); i += stride()) {
        if (i >= from) other_marks_ |= mark(i);
      }
    }
  }

  /// store(done word, uses before this call) for each sender whose message reaches into that use,
  /// by one thread of each tile.
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
      store(word, keeps(i) ? received_[source] : row(frame_.uses_received, i)[source]);
    });
  }

  template <typename F>
  __device__ __forceinline__ void for_own_tiles(F f) const {
    // A tile of which a message takes less than a warp's run still belongs to the block.
    if constexpr (Simple) {
      if (serves(first())) f(first());
    } else {
      for (uint32_t i = first(); serves(i); i += stride()) f(i);
    }
  }
  __device__ __forceinline__ bool serves(uint32_t i) const {
    return i / kTileVectors * kTileVectors < used_;
  }

  /// Uses that a message makes of the tile that begins at vector `tile` of a use.
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
  uint32_t used_ = 0;
  Counts<Ranks> sent_, received_;
  uint32_t first_mark_ = 0, other_marks_ = 0;
};

}  // namespace collx::cuda
