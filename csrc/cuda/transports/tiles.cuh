// Tiles of slots through which every two ranks exchange words in both directions, use by use, as
// one block sees them: vector i of a use belongs to tile i / kTileVectors. Blocks take runs of
// blockDim.x vectors in turn, a whole number of tiles.
#pragma once

#include "session.cuh"
#include "wire.cuh"

namespace collx::cuda {

/// Between two uses of the same tiles inside one kernel, by all threads of the block. The words of
/// the next use let peers go on to the one after it, so everything that this block still had to
/// read and re-arm comes first: of all its threads, since a tile's last use may be partial and
/// leave some of them without a word of their own.
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
    // The first tile's answer is looked at when the call ends, so that nothing waits for it.
    if (leads() && first() < used_) first_mark_ = atomicExch(&entry_of(first())->busy, 1u);
    if constexpr (!Simple) {
      for (uint32_t i = first() + stride(); leads() && i < used_; i += stride()) {
        other_marks_ |= atomicExch(&entry_of(i)->busy, 1u);
      }
    }
  }

  __device__ __forceinline__ bool overlaps() const { return (first_mark_ | other_marks_) != 0; }

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
  /// a sends. Slots of one use do not depend on each other. `meanwhile`, once, behind the last that
  /// a sends.
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

  /// Epoch of the tile of vector i, before this call.
  __device__ uint32_t epoch(uint32_t i) { return epoch_ = ptx::ld_here(&entry_of(i)->epoch); }

  /// The uses that the call has made of the tiles, the last of them of `last` vectors.
  __device__ __forceinline__ void count(uint32_t uses, uint32_t last) {
    uses_ = uses;
    last_ = last;
  }

  /// Advances the epochs by the uses of each tile.
  __device__ __forceinline__ void end() {
    if (!leads()) return;
    // One 8-byte store: the epoch never shows without the mark cleared.
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
  uint32_t epoch_ = 0;  // as read last
  uint32_t uses_ = 0, last_ = 0;
  uint32_t first_mark_ = 0;
  uint32_t other_marks_ = 0;
};

}  // namespace collx::cuda
