// One call on a communicator, as one block sees it: what every kernel does first and last, and
// the tiles that the block serves.
//
// USAGE  Session first thing in the kernel; Tiles for algorithms that push into slots; finish()
// last, by every thread of the block.
#pragma once

#include "failure.cuh"
#include "slots.cuh"

namespace collx::cuda {

/// Exchanges the calls' descriptors. Block 0 sends; every block waits before it touches a slot or
/// a tensor. The epoch is the header's own, the same for every op and algorithm; the last block to
/// have read it advances it.
/// `pairs`: what the call exchanges with each rank, where the two of them alone know it.
__device__ __forceinline__ void same_call(const KernelCall& call, Patience& patience,
                                          const Routes* pairs) {
  RegionHeader* own = call.header();
  const uint32_t epoch = *reinterpret_cast<volatile uint32_t*>(&own->check_epoch) + 1;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < call.world && peer != call.rank && patience.alive()) {
    uint64_t sends = 0, expects = 0;
    uint32_t mark = call.fingerprint;
    if (pairs != nullptr && call.descriptor.collective == Collective::alltoallv) {
      const int distance = peer >= call.rank ? peer - call.rank : peer - call.rank + call.world;
      sends = pairs->from[distance].bytes;
      expects = pairs->to[distance].bytes;
      mark = pair_fingerprint(mark, call.rank, peer, sends, expects);
    }
    const uint64_t value = static_cast<uint64_t>(epoch) << 32 | mark;
    if (blockIdx.x == 0) {
      CheckSlot& slot = call.header(peer)->check[epoch & 1][call.rank];
      slot.descriptor = call.descriptor;
      slot.descriptor.sends = sends;
      slot.descriptor.expects = expects;
      ptx::st_release_sys(&slot.flag, value);
    }
    CheckSlot& mail = own->check[epoch & 1][peer];
    uint64_t seen = 0;
    const bool arrived = patience.wait(
        Phase::check,
        [&] {
          seen = ptx::ld_acquire_sys(&mail.flag);
          return seen >> 32 == epoch;
        },
        [&] {
          return Blame{peer, epoch, seen >> 32};
        });
    if (arrived && seen != value) {
      patience.fail(Failure::mismatch, Phase::check, Blame{peer, value & ~0u, seen & ~0u},
                    &mail.descriptor, sends, expects);
    }
  }
  patience.agree();
  if (threadIdx.x == 0 && atomicAdd(&own->check_blocks, 1u) + 1 == gridDim.x) {
    own->check_blocks = 0;
    own->check_epoch = epoch;
  }
}

/// `Simple`, here and below: the call that is worth straight code of its own. A sum of whole
/// vectors, of equal parts where there are parts, unchecked, in one use of the tiles, of at most
/// one vector a thread.
template <bool Simple>
class Session {
 public:
  /// Waits for upstream work, then looks whether the communicator still works, and in checked
  /// mode whether all ranks make the same call.
  __device__ explicit Session(const KernelCall& call, const Routes* pairs = nullptr)
      : call(call), patience((ptx::griddepcontrol_wait(), call)) {
    if (call.pdl == PdlLevel::early) ptx::griddepcontrol_launch_dependents();
    if (!Simple && call.check) same_call(call, patience, pairs);
  }

  /// Whether this thread may still wait and store to peers: see Patience::alive.
  __device__ __forceinline__ bool alive() const { return patience.alive(); }

  /// `last` is what is left to do when every thread of the block has come so far.
  template <typename F>
  __device__ __forceinline__ void finish(F last) {
    const bool failed = __syncthreads_or(!alive());
    last();
    if (blockIdx.x == 0 && threadIdx.x == 0 && !failed) ptx::red_add(&call.header()->sequence, 1);
    if (call.pdl == PdlLevel::end) ptx::griddepcontrol_launch_dependents();
    // At the very end, where a call costs no registers.
    if (__builtin_expect(failed, 0)) patience.tell();
  }
  __device__ __forceinline__ void finish() {
    finish([] {});
  }

  const KernelCall& call;
  Patience patience;
};

/// Between two uses of the same tiles inside one kernel, by all threads of the block. The words of
/// the next use let peers go on to the one after it, so everything that this block still had to
/// read and re-arm comes first: of all its threads, since a tile's last use may be partial and
/// leave some of them without a word of their own.
__device__ __forceinline__ void next_use() {
  __syncthreads();
  ptx::fence_acq_rel_sys();
}

/// Offset of vector i of a use from the slots of stage 0 and parity 0 of the same sender.
__device__ __forceinline__ uint32_t slot_offset(const KernelCall& call, int stage, uint32_t epoch,
                                                uint32_t i) {
  return (2 * stage + (epoch & 1)) * call.parity_bytes + i * kVectorBytes;
}

/// Where one vector arrives from each rank; this rank's own place is never written by anyone else.
///
/// Of a few ranks the addresses are kept, so that a polling loop does not compute them. Of many
/// they would take the registers that the vectors need, and offsets take half as many.
template <int Ranks>
class Arrivals {
  static constexpr bool kKept = Ranks <= 4;

 public:
  /// `offset`: the vector's slot_offset.
  __device__ __forceinline__ Arrivals(const KernelCall& call, uint32_t offset)
      : Arrivals(call, [=](int) { return offset; }) {}

  /// `offset_of(source)`: likewise, where sources differ in it.
  template <typename OffsetOf>
  __device__ __forceinline__ Arrivals(const KernelCall& call, OffsetOf offset_of) : call_(call) {
#pragma unroll
    for (int source = 0; source < Ranks; ++source) {
      const uint32_t offset = offset_of(source) + source * call.source_bytes;
      if constexpr (kKept) {
        slot_[source] = ptx::keep(call.arriving + offset);
      } else {
        offset_[source] = offset;
      }
    }
  }

  __device__ __forceinline__ char* slot(int source) const {
    if constexpr (kKept) {
      return slot_[source];
    } else {
      return call_.arriving + ptx::keep(offset_[source]);
    }
  }

  /// Arms what was read for its next use; with the own slot, which costs less than leaving it out.
  template <typename S>
  __device__ __forceinline__ void rearm(int world) const {
#pragma unroll
    for (int source = 0; source < Ranks; ++source) {
      if (source < world) S::rearm(slot(source));
    }
  }

 private:
  const KernelCall& call_;
  char* slot_[kKept ? Ranks : 1];
  uint32_t offset_[kKept ? 1 : Ranks];
};

/// Waits for one vector from every rank that `expects(source)`, and takes `own` for the others': v
/// in rank order.
template <typename S, int Ranks, bool Simple, typename Expects>
__device__ __forceinline__ bool await_vectors(Session<Simple>& session, Phase phase, uint32_t epoch,
                                              const Vector& own, const Arrivals<Ranks>& arrivals,
                                              Vector (&v)[Ranks], Expects expects) {
  return session.patience.wait(
      phase,
      [&] {
        uint32_t worst = 0;
#pragma unroll
        for (int source = 0; source < Ranks; ++source) {
          Vector seen = own;
          if (expects(source)) {
            worst = max(worst, S::poll(arrivals.slot(source), seen));
          }
          v[source] = seen;
        }
        return worst != ~0u;
      },
      [&] {
        int missing = session.call.rank;  // nobody: all have come since
        Vector seen;
#pragma unroll
        for (int source = Ranks - 1; source >= 0; --source) {
          if (expects(source) && S::poll(arrivals.slot(source), seen) == ~0u) {
            missing = source;
          }
        }
        return Blame{missing, epoch, 0};
      });
}

/// The same from every peer.
template <typename S, int Ranks, bool Simple>
__device__ __forceinline__ bool await_vectors(Session<Simple>& session, Phase phase, int world,
                                              uint32_t epoch, const Vector& own,
                                              const Arrivals<Ranks>& arrivals, Vector (&v)[Ranks]) {
  const int rank = session.call.rank;
  return await_vectors<S>(session, phase, epoch, own, arrivals, v,
                          [=](int source) { return source < world && source != rank; });
}

/// What came from the peers, without masks. By whole warps, whether or not all has arrived.
template <typename S, int Ranks>
__device__ __forceinline__ void unmask(const KernelCall& call, int world, Vector (&v)[Ranks]) {
  if constexpr (S::kMasked) {
#pragma unroll
    for (int source = 0; source < Ranks; ++source) {
      if (source < world && source != call.rank) v[source] = S::received(v[source]);
    }
  }
}

/// The tiles of the call's area that this block serves: vector i of a use belongs to tile
/// i / kTileVectors. Blocks take runs of blockDim.x vectors in turn, a whole number of tiles.
template <bool Simple>
class Tiles {
 public:
  __device__ explicit Tiles(const KernelCall& call)
      : entries_(call.entries),
        used_(Simple || call.vectors < call.capacity ? static_cast<uint32_t>(call.vectors)
                                                     : call.capacity) {
    // The first tile's answer is looked at when the call ends, so that nothing waits for it.
    if (leads() && first() < used_) first_mark_ = atomicExch(&entry_of(first())->busy, 1u);
    if constexpr (!Simple) {
      for (uint32_t i = first() + stride(); leads() && i < used_; i += stride()) {
        other_marks_ |= atomicExch(&entry_of(i)->busy, 1u);
      }
    }
  }

  /// Calls f with each of the first n vectors that are this thread's, n at most the capacity.
  template <typename F>
  __device__ __forceinline__ void for_own(uint32_t n, F f) const {
    if constexpr (Simple) {
      if (first() < n) f(first());
    } else {
      for (uint32_t i = first(); i < n; i += stride()) f(i);
    }
  }

  /// Calls a with each of them, and b with each, one vector behind: what b waits for travels while
  /// a sends. Slots of one use do not depend on each other.
  template <typename A, typename B>
  __device__ __forceinline__ void for_own_behind(uint32_t n, A a, B b) const {
    uint32_t i = first();
    if (i < n) a(i);
    for (; i < n; i += stride()) {
      if (i + stride() < n) a(i + stride());
      b(i);
    }
  }

  /// Epoch of the tile of vector i, before this call.
  __device__ uint32_t epoch(uint32_t i) { return epoch_ = ptx::ld_here(&entry_of(i)->epoch); }

  /// Last thing in a kernel, by all the block's threads: ends the session and advances the epochs
  /// by the uses that this call made of each tile, the last of them of `last` vectors.
  __device__ __forceinline__ void finish(Session<Simple>& session, uint32_t uses, uint32_t last) {
    if ((first_mark_ | other_marks_) != 0 && session.alive()) {
      session.patience.fail(Failure::overlap, Phase::none, Blame{session.call.rank, 0, 1});
    }
    session.finish([&] {  // every thread of the block has read its epochs
      if (!leads()) return;
      // One 8-byte store: the epoch never shows without the mark cleared.
      const auto advance = [&](uint32_t i, uint32_t to) {
        *reinterpret_cast<uint2*>(entry_of(i)) = make_uint2(to, 0u);
      };
      if constexpr (Simple) {
        if (first() < used_) advance(first(), epoch_ + 1);
      } else {
        for_own(used_, [&](uint32_t i) { advance(i, epoch(i) + uses - (i < last ? 0u : 1u)); });
      }
    });
  }

 private:
  /// One thread of each tile does its bookkeeping.
  __device__ bool leads() const { return threadIdx.x % kTileVectors == 0; }
  __device__ TileEntry* entry_of(uint32_t i) const { return entries_ + i / kTileVectors; }

  __device__ uint32_t first() const { return blockIdx.x * blockDim.x + threadIdx.x; }
  __device__ uint32_t stride() const { return gridDim.x * blockDim.x; }

  TileEntry* entries_;
  uint32_t used_;
  uint32_t epoch_ = 0;  // as read last
  uint32_t first_mark_ = 0;
  uint32_t other_marks_ = 0;
};

}  // namespace collx::cuda
