// The tiles of slots in which the rows of a normalization travel, from the view of one block.
//
// A use of the slots carries several rows, each at its own position. Position p belongs to cluster
// p % clusters of the grid. Each block of that cluster serves the tiles of its own piece of the
// row. The piece is at the same place on every rank, regardless of the grid sizes.
#pragma once

#include "../../protocol/uses.h"
#include "../arguments/norm_arguments.cuh"
#include "sinks.cuh"
#include "sources.cuh"
#include "tiles.cuh"

namespace collx::cuda {

struct PieceSlot {
  uint32_t offset;  // from the slots of stage 0 and parity 0 of the same sender
  uint32_t epoch;
};

template <bool Simple>
class Pieces : public Transport {
 public:
  static constexpr bool kSimple = Simple;

  __device__ __forceinline__ Pieces(const KernelCall& call, const Patience&,
                                    const NormArguments& norm)
      : call_(call), norm_(norm) {
    // Marks the tiles as busy by an addition, which keeps the marks of other calls.
    for_tiles([&](uint32_t p, TileEntry* entry) {
      if (p == norm.cluster()) first_epoch_ = ptx::ld_here(&entry->epoch);
      ptx::red_add(&entry->busy, 1u);
    });
  }

  /// Checks the marks of other calls. It runs after the first stores to peers, so that nothing
  /// waits for the loads. If two calls overlap, the one that checks later sees both marks.
  __device__ __forceinline__ void look() {
    for_tiles(
        [&](uint32_t, TileEntry* entry) { overlaps_ |= ptx::ld_relaxed_gpu(&entry->busy) != 1; });
  }

  /// The slot at byte `byte` of the piece at position p. If the tiles of a stage are full, the
  /// piece continues in the next stage.
  __device__ __forceinline__ PieceSlot slot(int stage, uint32_t p, uint32_t byte) const {
    const uint32_t room = norm_.shape.piece_tiles * kTileBytes;
    if (byte >= room) {
      byte -= room;
      ++stage;
    }
    const uint32_t tile = first_tile(p) + byte / kTileBytes;
    const uint32_t epoch = ptx::ld_here(&call_.entries[tile].epoch) + use_;
    return {(2 * stage + (epoch & 1)) * call_.parity_bytes + first_tile(p) * kTileBytes + byte,
            epoch};
  }

  /// Called by all threads of the block before every use except the first.
  __device__ __forceinline__ void next() {
    next_use();
    ++use_;
  }

  __device__ __forceinline__ bool overlaps() const { return overlaps_; }

  /// Advances the epoch of each tile by its number of uses.
  __device__ __forceinline__ void end() const {
    for_tiles([&](uint32_t p, TileEntry* entry) {
      const uint32_t uses = (norm_.full_uses + (p < norm_.last_use ? 1 : 0)) * norm_.shape.steps;
      const uint32_t epoch = p == norm_.cluster() ? first_epoch_ : ptx::ld_here(&entry->epoch);
      // A single 8-byte store, so that no kernel sees the new epoch with the mark still set.
      *reinterpret_cast<uint2*>(entry) = make_uint2(epoch + uses, 0u);
    });
  }

 private:
  __device__ __forceinline__ uint32_t first_tile(uint32_t p) const {
    return ((p << norm_.cluster_bits) + norm_.cluster_rank()) * norm_.shape.piece_tiles;
  }

  /// Calls f in one thread for each tile. A piece never has more tiles than a block has threads.
  template <typename F>
  __device__ __forceinline__ void for_tiles(F f) const {
    if (threadIdx.x >= norm_.shape.piece_tiles) return;
    norm_.for_own(norm_.full_uses > 0 ? norm_.shape.rows_per_use : norm_.last_use,
                  [&](uint32_t p) { f(p, &call_.entries[first_tile(p) + threadIdx.x]); });
  }

  const KernelCall& call_;
  const NormArguments& norm_;
  uint32_t use_ = 0;
  uint32_t first_epoch_ = 0;  // of this thread's tile at the cluster's first position
  bool overlaps_ = false;
};

/// Processes rows through the slots, use by use and row by row. `look_up(j)` loads the part of row
/// j that is pushed, `push(p, j)` pushes it to position p, and `row(p, j, push_next)` processes the
/// row. It calls push_next() once for each of its steps, and from then on the words of the next row
/// are in flight. `prefetch` runs after the first stores to peers, for loads that these stores do
/// not need.
template <bool Simple, typename Prefetch, typename LookUp, typename Push, typename Row>
__device__ __forceinline__ void run_rows(Session<Pieces<Simple>>& session,
                                         const NormArguments& norm, Prefetch prefetch,
                                         LookUp look_up, Push push, Row row) {
  Pieces<Simple>& pieces = session.transport;
  for (Uses uses(norm.rows, norm.shape.rows_per_use); uses.any(); uses.next()) {
    const auto n = static_cast<uint32_t>(uses.count());
    const uint64_t first = uses.first();
    if (first > 0) pieces.next();
    uint32_t p = norm.cluster();
    if (p < n) {
      look_up(first + p);
      push(p, first + p);
    }
    if (first == 0) {
      pieces.look();
      prefetch();
    }
    while (p < n) {
      const uint32_t next = p + norm.clusters();
      if (next < n) look_up(first + next);
      row(p, first + p, [&] {
        if (next < n) push(next, first + next);
      });
      p = next;
    }
  }
}

}  // namespace collx::cuda
