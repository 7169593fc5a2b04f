// Tiles of slots, from the view of one block. Every two ranks exchange words through them in both
// directions, use by use. Vector i of a use belongs to tile i / kTileVectors. Blocks take runs of
// blockDim.x vectors in turn, which are a whole number of tiles.
#pragma once

#include "session.cuh"
#include "wire.cuh"

namespace collx::cuda {

/// Separates two uses of the same tiles within one kernel; called by all threads of the block. The
/// words of the next use allow peers to start the use after it. Therefore the block must first
/// finish all of its reads and re-arms. This includes all of its threads: the last use of a tile
/// may be partial, so some threads send no word in it.
__device__ __forceinline__ void next_use() {
  __syncthreads();
  ptx::fence_acq_rel_sys();
}

template <bool Simple>
class Tiles : public Transport {
 public:
  static constexpr bool kSimple = Simple;

  __device__ __forceinline__ Tiles(const KernelCall& call, const Patience&)
      : entries_(call.entries),
        used_(Simple || call.vectors < call.capacity ? static_cast<uint32_t>(call.vectors)
                                                     : call.capacity) {
    // The call reads the first tile's old mark only at its end, so that nothing waits for it.
    if (leads() && first() < used_) first_mark_ = atomicExch(&entry_of(first())->busy, 1u);
    if constexpr (!Simple) {
      for (uint32_t i = first() + stride(); leads() && i < used_; i += stride()) {
        other_marks_ |= atomicExch(&entry_of(i)->busy, 1u);
      }
    }
  }

  __device__ __forceinline__ bool overlaps() const { return (first_mark_ | other_marks_) != 0; }

  /// Calls f for each of the first n vectors that belongs to this thread. n is at most the
  /// capacity.
  template <typename F>
  __device__ __forceinline__ void for_own(uint32_t n, F f) const {
    if constexpr (Simple) {
      if (first() < n) f(first());
    } else {
      for (uint32_t i = first(); i < n; i += stride()) f(i);
    }
  }

  /// Calls a and b for each of these vectors. b runs one vector behind a, so the words that b waits
  /// for travel while a sends. Slots of one use do not depend on each other. `meanwhile` is called
  /// once, after the last send of a.
  template <typename Meanwhile, typename A, typename B>
  __device__ __forceinline__ void for_own_behind(uint32_t n, Meanwhile meanwhile, A a, B b) const {
    uint32_t i = first();
    if (i < n) a(i);
    for (bool more = true; more; i += stride()) {
      more = i + stride() < n;
      more ? a(i + stride()) : meanwhile();
      if (i < n) b(i);
    }
  }

  /// The epoch of vector i's tile before this call.
  __device__ uint32_t epoch(uint32_t i) { return epoch_ = ptx::ld_here(&entry_of(i)->epoch); }

  /// The number of uses that the call has made of the tiles. The last use has `last` vectors.
  __device__ __forceinline__ void count(uint32_t uses, uint32_t last) {
    uses_ = uses;
    last_ = last;
  }

  /// Advances the epoch of each tile by its number of uses.
  __device__ __forceinline__ void end() {
    if (!leads()) return;
    // A single 8-byte store, so that no kernel sees the new epoch with the mark still set.
    const auto advance = [&](uint32_t i, uint32_t to) {
      *reinterpret_cast<uint2*>(entry_of(i)) = make_uint2(to, 0u);
    };
    if constexpr (Simple) {
      if (first() < used_) advance(first(), epoch_ + 1);
    } else {
      for_own(used_, [&](uint32_t i) { advance(i, epoch(i) + uses_ - (i < last_ ? 0u : 1u)); });
    }
  }

 private:
  /// One thread of each tile does its bookkeeping.
  __device__ bool leads() const { return threadIdx.x % kTileVectors == 0; }
  __device__ TileEntry* entry_of(uint32_t i) const { return entries_ + i / kTileVectors; }

  __device__ uint32_t first() const { return blockIdx.x * blockDim.x + threadIdx.x; }
  __device__ uint32_t stride() const { return gridDim.x * blockDim.x; }

  TileEntry* entries_;
  uint32_t used_;
  uint32_t epoch_ = 0;  // the epoch that was read last
  uint32_t uses_ = 0, last_ = 0;
  uint32_t first_mark_ = 0;
  uint32_t other_marks_ = 0;
};

}  // namespace collx::cuda
