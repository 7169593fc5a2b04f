// The tiles of slots in which rows of a normalisation travel, as one block sees them.
//
// A use of the slots takes some rows at once, each at a position of its own. Position p belongs to
// cluster p % clusters of the grid, and each block of that cluster serves the tiles of its own piece
// of the row, at the same place on every rank however large the grids are.
#pragma once

#include "session.cuh"

namespace collx::cuda {

struct PieceSlot {
  uint32_t offset;  // from the slots of stage 0 and parity 0 of the same sender
  uint32_t epoch;
};

class Pieces {
 public:
  /// `rows`: in all uses together.
  __device__ Pieces(const KernelCall& call, const NormShape& shape, uint64_t rows)
      : call_(call), shape_(shape), rows_(rows) {
    // Looked at when the call ends: see Tiles.
    for_tiles([&](uint32_t, TileEntry* entry) { marks_ |= atomicExch(&entry->busy, 1u); });
  }

  /// f(p) for each position of this cluster among the first n.
  template <typename F>
  __device__ __forceinline__ void for_own(uint64_t n, F f) const {
    const uint32_t clusters = gridDim.x / shape_.cluster;
    for (uint32_t p = blockIdx.x / shape_.cluster; p < n; p += clusters) f(p);
  }

  /// The slot at that byte of the piece at position p.
  __device__ __forceinline__ PieceSlot slot(int stage, uint32_t p, uint32_t byte) const {
    const uint32_t tile = first_tile(p) + byte / kTileBytes;
    const uint32_t epoch = ptx::ld_here(&call_.entries[tile].epoch) + use_;
    return {(2 * stage + (epoch & 1)) * call_.parity_bytes + first_tile(p) * kTileBytes + byte,
            epoch};
  }

  /// Before every use but the first, by all threads of the block.
  __device__ __forceinline__ void next() {
    next_use();
    ++use_;
  }

  /// Last thing in a kernel, by all threads of the block.
  template <bool Simple>
  __device__ __forceinline__ void finish(Session<Simple>& session) {
    if (marks_ != 0 && session.alive()) {
      session.patience.fail(Failure::overlap, Phase::none, Blame{call_.rank, 0, 1});
    }
    session.finish([&] {  // every thread of the block has read its epochs
      for_tiles([&](uint32_t p, TileEntry* entry) {
        const auto uses =
            static_cast<uint32_t>(ceil_div<uint64_t>(rows_ - p, shape_.rows_per_use)) *
            shape_.steps;
        // One 8-byte store: the epoch never shows without the mark cleared.
        *reinterpret_cast<uint2*>(entry) = make_uint2(ptx::ld_here(&entry->epoch) + uses, 0u);
      });
    });
  }

 private:
  __device__ __forceinline__ uint32_t first_tile(uint32_t p) const {
    return (p * shape_.cluster + blockIdx.x % shape_.cluster) * shape_.piece_tiles;
  }

  /// One thread for each tile. A piece never has more tiles than a block has threads.
  template <typename F>
  __device__ __forceinline__ void for_tiles(F f) const {
    if (threadIdx.x >= shape_.piece_tiles) return;
    for_own(rows_ < shape_.rows_per_use ? rows_ : shape_.rows_per_use,
            [&](uint32_t p) { f(p, &call_.entries[first_tile(p) + threadIdx.x]); });
  }

  const KernelCall& call_;
  const NormShape& shape_;
  const uint64_t rows_;
  uint32_t use_ = 0;
  uint32_t marks_ = 0;
};

}  // namespace collx::cuda
