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
__device__ __forceinline__ void same_call(const RankView& view, const KernelCall& call,
                                          Patience& patience) {
  RegionHeader* own = view.header(view.rank);
  const uint32_t epoch = *reinterpret_cast<volatile uint32_t*>(&own->check_epoch) + 1;
  const uint64_t value = static_cast<uint64_t>(epoch) << 32 | call.fingerprint;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < view.world && peer != view.rank && patience.alive()) {
    if (blockIdx.x == 0) {
      CheckSlot& slot = view.header(peer)->check[epoch & 1][view.rank];
      slot.descriptor = call.descriptor;
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
                    &mail.descriptor);
    }
  }
  patience.agree();
  if (threadIdx.x == 0 && atomicAdd(&own->check_blocks, 1u) + 1 == gridDim.x) {
    own->check_blocks = 0;
    own->check_epoch = epoch;
  }
}

class Session {
 public:
  /// Waits for upstream work, then looks whether the communicator still works, and in checked
  /// mode whether all ranks make the same call.
  __device__ Session(const RankView& view, const KernelCall& call)
      : view(view), call(call), patience((ptx::griddepcontrol_wait(), view)) {
    if (view.pdl == PdlLevel::early) ptx::griddepcontrol_launch_dependents();
    if (view.check) same_call(view, call, patience);
  }

  /// Whether this thread may still wait and store to peers: see Patience::alive.
  __device__ __forceinline__ bool alive() const { return patience.alive(); }

  __device__ void finish() {
    patience.conclude(call);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      // As an atomic without a result, which nothing waits for.
      atomicAdd(reinterpret_cast<unsigned long long*>(&view.header(view.rank)->sequence), 1ull);
    }
    if (view.pdl == PdlLevel::end) ptx::griddepcontrol_launch_dependents();
  }

  const RankView& view;
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

/// Waits for one vector from every peer and takes `own` for this rank's: v in rank order.
/// `slot(source)` is where the vector of `source` arrives.
template <typename S, int Ranks, typename Slot>
__device__ __forceinline__ bool await_vectors(Session& session, Phase phase, int world,
                                              uint32_t epoch, const Vector& own, Slot slot,
                                              Vector (&v)[Ranks]) {
  int missing = 0;
  return session.patience.wait(
      phase,
      [&] {
        bool all = true;
#pragma unroll
        for (int source = 0; source < Ranks; ++source) {
          Vector seen = own;
          if (source < world && source != session.view.rank &&
              !S::poll(slot(source), seen, epoch)) {
            all = false;
            missing = source;
          }
          v[source] = seen;
        }
        return all;
      },
      [&] {
        return Blame{missing, epoch, 0};
      });
}

/// The tiles of an area that this block serves in this call: vector i of a use belongs to tile
/// i / kTileVectors. Blocks take runs of blockDim.x vectors in turn, a whole number of tiles.
class Tiles {
 public:
  __device__ Tiles(const Session& session, const SlotArea& area, uint64_t vectors)
      : entries_(
            reinterpret_cast<TileEntry*>(session.view.region[session.view.rank] + area.entries)),
        vectors_(vectors),
        capacity_(area.tiles * kTileVectors) {
    // The first tile's answer is looked at when the call ends, so that nothing waits for it.
    if (leads() && first() < used()) first_mark_ = atomicExch(&entry_of(first())->busy, 1u);
    for_own_tiles(first() + stride(),
                  [&](uint32_t i) { other_marks_ |= atomicExch(&entry_of(i)->busy, 1u); });
  }

  /// Vectors that one use of all tiles carries; a longer call uses them several times.
  __device__ uint32_t capacity() const { return capacity_; }

  __device__ uint32_t first() const { return blockIdx.x * blockDim.x + threadIdx.x; }
  __device__ uint32_t stride() const { return gridDim.x * blockDim.x; }

  /// Epoch of the tile of vector i, before this call.
  __device__ uint32_t epoch(uint32_t i) const { return entry_of(i)->epoch; }

  /// Advances the epochs by the uses that this call made of each tile. All the block's threads.
  __device__ void finish(Session& session) {
    __syncthreads();  // every thread has read its epochs
    for_own_tiles(first(), [&](uint32_t i) {
      // One 8-byte store: the epoch never shows without the mark cleared.
      *reinterpret_cast<uint2*>(entry_of(i)) = make_uint2(epoch(i) + uses_of(i), 0u);
    });
    if ((first_mark_ | other_marks_) != 0 && session.alive()) {
      session.patience.fail(Failure::overlap, Phase::none, Blame{session.view.rank, 0, 1});
    }
  }

 private:
  /// One thread of each tile does its bookkeeping.
  __device__ bool leads() const { return threadIdx.x % kTileVectors == 0; }
  __device__ uint64_t used() const { return vectors_ < capacity_ ? vectors_ : capacity_; }
  __device__ TileEntry* entry_of(uint32_t i) const { return entries_ + i / kTileVectors; }

  /// How often this call uses the tile that starts at vector i.
  __device__ uint32_t uses_of(uint32_t i) const {
    return static_cast<uint32_t>(vectors_ / capacity_ + (vectors_ % capacity_ > i ? 1 : 0));
  }

  template <typename F>
  __device__ void for_own_tiles(uint32_t from, F f) {
    if (!leads()) return;
    for (uint32_t i = from; i < used(); i += stride()) f(i);
  }

  TileEntry* entries_;
  uint64_t vectors_;
  uint32_t capacity_;
  uint32_t first_mark_ = 0;
  uint32_t other_marks_ = 0;
};

}  // namespace collx::cuda
