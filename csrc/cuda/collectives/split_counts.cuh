// The exchange of counts in an alltoallv with splits in device memory: each rank tells every other
// rank how many rows it sends, and lays out its messages.
//
// The counts are words {rows, epoch} in a mailbox. Every call uses it in both directions between
// all ranks, so two mailboxes are sufficient. Every block reads all counts itself.
#pragma once

#include "../transports/session.cuh"
#include "device_rows.cuh"

namespace collx::cuda {

constexpr uint64_t kEpochMask = (1ull << kCountEpochBits) - 1;
constexpr uint64_t kRefused = ~0ull >> kCountEpochBits;  // sent instead of rows

/// In shared memory of the block.
struct Agreed {
  uint64_t sent[kMaxCudaRanks];      // rows, by rank
  uint64_t received[kMaxCudaRanks];  // rows, by rank
  uint32_t epoch;                    // of the counts
  bool long_from, long_to;           // whether the message from, or to, this rank is left
  Routes routes;
};

/// Sums of rows.
struct RowSums {
  uint64_t before;  // of the ranks before this thread's
  uint64_t all;     // of all ranks; kRefused if they exceed the capacity
};

/// `rows`: those of rank threadIdx.x. All threads of a warp call it.
template <int Ranks>
__device__ __forceinline__ RowSums sums_of(uint64_t rows, int world, uint64_t capacity) {
  const int own = static_cast<int>(threadIdx.x);
  RowSums sums{};
  bool fits = true;
#pragma unroll
  for (int rank = 0; rank < Ranks; ++rank) {
    const uint64_t of_rank = __shfl_sync(~0u, rows, rank);
    if (rank >= world) continue;
    fits &= of_rank <= capacity;  // each on its own, since a sum may wrap around
    sums.all += of_rank;
    if (rank < own) sums.before += of_rank;
  }
  return fits && sums.all <= capacity ? sums : RowSums{0, kRefused};
}

/// Fails because the splits do not fit.
__device__ __forceinline__ void refuse(const KernelCall& call, Patience& patience, Phase phase,
                                       const uint64_t* rows, uint64_t capacity) {
  if (!patience.alive()) return;
  uint64_t sum = 0;
  for (int r = 0; r < call.world; ++r) sum += rows[r];
  patience.fail(Failure::splits, phase, Blame{call.rank, capacity, sum});
}

/// Lays out the messages that this rank sends, and announces their rows to the other ranks. Thread
/// r < world of each block handles rank r here and below. If the splits do not fit the input, the
/// thread of this rank fails. `then(peer)`: called after the message to a rank has been laid out.
template <int Ranks, typename Then>
__device__ __forceinline__ void announce_counts(const KernelCall& call, Patience& patience,
                                                const Routes& tensors, const DeviceSplits& given,
                                                Agreed& agreed, Then then) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer == kWarpLanes) static_cast<RouteFrame&>(agreed.routes) = tensors;
  if (peer >= kWarpLanes) return;
  uint64_t rows = 0;
  uint32_t epoch = 0;
  if (peer < call.world) {
    // Both loads are in flight together.
    const uint32_t before = ptx::ld_here(&call.header()->counts_epoch);
    rows = static_cast<uint64_t>(given.sent[peer]);
    epoch = before + 1;
    agreed.sent[peer] = rows;
    agreed.epoch = epoch;
  }
  __syncwarp();
  const RowSums sums = sums_of<Ranks>(rows, call.world, given.rows);
  if (peer >= call.world) return;
  const bool refused = sums.all == kRefused;
  if (blockIdx.x == 0 && peer != call.rank && patience.alive()) {
    // A single relaxed word: it orders no other access.
    ptx::st_relaxed_sys(&call.header(peer)->counts[epoch & 1][call.rank],
                        (refused ? kRefused : rows) << kCountEpochBits | (epoch & kEpochMask));
  }
  agreed.routes.from[call.distance_to(peer, call.world)] =
      rows_of(tensors.from[0], given.row_bytes, sums.before, refused ? 0 : rows);
  then(peer);
  if (refused && peer == call.rank) {
    refuse(call, patience, Phase::counts, agreed.sent, given.rows);
  }
}

/// The number of rows from a peer.
__device__ __forceinline__ uint64_t count_of(const KernelCall& call, Patience& patience, int peer,
                                             const Agreed& agreed) {
  const uint64_t mark = agreed.epoch & kEpochMask;
  uint64_t seen = 0;
  const auto blame = [&] { return Blame{peer, mark, seen & kEpochMask}; };
  patience.wait(
      Phase::counts,
      [&] {
        seen = ptx::ld_relaxed_sys(&call.header()->counts[agreed.epoch & 1][peer]);
        return (seen & kEpochMask) == mark;
      },
      blame);
  const uint64_t rows = seen >> kCountEpochBits;
  // The rank that refuses its splits reports the failure. Wait for that report instead of failing
  // for a later reason.
  if (rows == kRefused) {
    patience.wait(
        Phase::counts, [] { return false; }, blame);
  }
  return rows;
}

/// After all threads of the block have read the epoch. The thread is in a warp that does not wait
/// for counts.
__device__ __forceinline__ void advance_counts(const KernelCall& call, const Agreed& agreed) {
  RegionHeader* own = call.header();
  if (threadIdx.x + 1 == blockDim.x) advance(own->counts_epoch, own->counts_blocks, agreed.epoch);
}

/// Waits for the counts, lays out the received rows, and stores their numbers. If they do not fit
/// the output, a thread fails. `then(peer)`: called after the message from a rank has been laid
/// out.
template <int Ranks, typename Then>
__device__ __forceinline__ void await_counts(const KernelCall& call, Patience& patience,
                                             const Routes& tensors, const DeviceSplits& given,
                                             Agreed& agreed, Then then) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= kWarpLanes) return;
  uint64_t rows = 0;
  if (peer < call.world) {
    const bool own = peer == call.rank;
    rows = own ? agreed.sent[peer] : count_of(call, patience, peer, agreed);
    agreed.received[peer] = rows;
  }
  __syncwarp();
  const RowSums sums = sums_of<Ranks>(rows, call.world, given.capacity);
  // The thread after the last rank's thread does the same for the output after the last row.
  if (peer > call.world) return;
  const bool behind = peer == call.world;
  if (behind) rows = given.capacity - sums.all;
  Message& to =
      behind ? agreed.routes.cleared : agreed.routes.to[call.distance_to(peer, call.world)];
  to = rows_of(tensors.to[0], given.row_bytes, sums.before, rows);
  if (!behind) {
    then(peer);
    if (blockIdx.x == 0) given.received[peer] = static_cast<int64_t>(rows);
  } else if (sums.all == kRefused) {
    refuse(call, patience, Phase::arrival, agreed.received, given.capacity);
  }
}

}  // namespace collx::cuda
