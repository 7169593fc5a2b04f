// Alltoallv with splits in device memory. The ranks exchange the number of rows that they are going
// to send, and send these rows through channels at the same time. A rank waits for rows after it
// has received the counts. With two ranks, a long message is left to a second kernel
// (alltoallv_long.cuh): by then the sender and the receiver both know its length.
//
// The counts are words {rows, epoch} in a mailbox. Every call uses it in both directions between
// all ranks, so two mailboxes are sufficient. Every block reads all counts itself.
#pragma once

#include "device_rows.cuh"
#include "one_way.cuh"

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

/// The sum of the rows of all ranks before `rank`; of all ranks if `rank` is the world size.
/// Returns kRefused if the sum exceeds the capacity.
__device__ __forceinline__ uint64_t rows_before(const uint64_t* rows, int rank, uint64_t capacity) {
  uint64_t sum = 0;
  for (int r = 0; r < rank; ++r) {
    // Each count is checked on its own, since a sum may wrap around.
    if (rows[r] > capacity) return kRefused;
    sum += rows[r];
  }
  return sum <= capacity ? sum : kRefused;
}

/// Fails because the splits do not fit.
__device__ __forceinline__ void refuse(const KernelCall& call, Patience& patience, Phase phase,
                                       const uint64_t* rows, uint64_t capacity) {
  if (!patience.alive()) return;
  uint64_t sum = 0;
  for (int r = 0; r < call.world; ++r) sum += rows[r];
  patience.fail(Failure::splits, phase, Blame{call.rank, capacity, sum});
}

/// The number of wire vectors of the longest message to or from another rank.
__device__ __forceinline__ uint64_t most_vectors(const Message* messages, int world) {
  uint64_t vectors = 0;
  for (int d = 1; d < world; ++d) vectors = max(vectors, messages[d].wire);
  return vectors;
}

/// Whether a message is left to the second kernel. If so, it does not use the channels.
template <int Ranks>
__device__ __forceinline__ bool is_left(const KernelCall& call, Message& m) {
  if (Ranks > 2 || !is_long(m.wire, call.capacity)) return false;
  m.wire = 0;
  return true;
}

/// Channels whose messages become known during the call: first the messages that this rank sends,
/// then those that it receives. Thread r < world of each block handles rank r. The counts of more
/// than two ranks would take registers that the vectors need.
template <int Ranks>
class SplitChannels : public Channels<Ranks, false, Ranks == 2> {
  using Base = Channels<Ranks, false, Ranks == 2>;

 public:
  using Transport::pairs;
  /// Announces the counts to the other ranks. If the splits do not fit the input, the block fails.
  __device__ __forceinline__ SplitChannels(const KernelCall& call, Patience& patience,
                                           const Routes& tensors, const DeviceSplits& given,
                                           Agreed& agreed)
      : Base(call, patience, agreed.routes, 0, tensors) {
    announce(call, patience, tensors, given, agreed);
    this->extend(most_vectors(agreed.routes.from, call.world));
  }

  /// Waits for the counts, and computes the layout of the received rows. Returns false if they do
  /// not fit the output.
  static __device__ __forceinline__ bool meet(Session<SplitChannels>& session,
                                              const Routes& tensors, const DeviceSplits& given,
                                              Agreed& agreed) {
    const KernelCall& call = session.call;
    Patience& patience = session.patience;
    const int peer = static_cast<int>(threadIdx.x);
    advance(call, agreed);
    if (peer < call.world) {
      const bool own = peer == call.rank;
      agreed.received[peer] = own ? agreed.sent[peer] : count_of(call, patience, peer, agreed);
    }
    __syncwarp();
    // The thread after the last rank's thread does the same for the output after the last row.
    if (peer <= call.world) {
      const bool behind = peer == call.world;
      const uint64_t start = rows_before(agreed.received, peer, given.capacity);
      const uint64_t rows = behind ? given.capacity - start : agreed.received[peer];
      Message& to =
          behind ? agreed.routes.cleared : agreed.routes.to[call.distance_to(peer, call.world)];
      to = rows_of(tensors.to[0], given.row_bytes, start, rows);
      if (behind) {
        if (start == kRefused) {
          refuse(call, patience, Phase::arrival, agreed.received, given.capacity);
        }
      } else {
        if (peer != call.rank) agreed.long_to = is_left<Ranks>(call, to);
        if (blockIdx.x == 0) given.received[peer] = static_cast<int64_t>(rows);
      }
    }
    if (!patience.agree()) return false;
    session.transport.extend(most_vectors(agreed.routes.to, call.world));
    return true;
  }

 private:
  static __device__ __forceinline__ void announce(const KernelCall& call, Patience& patience,
                                                  const Routes& tensors, const DeviceSplits& given,
                                                  Agreed& agreed) {
    RegionHeader* own = call.header();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < call.world) {
      // Both loads are in flight together.
      const uint32_t before = ptx::ld_here(&own->counts_epoch);
      agreed.sent[peer] = static_cast<uint64_t>(given.sent[peer]);
      agreed.epoch = before + 1;
    } else if (peer == kWarpLanes) {
      static_cast<RouteFrame&>(agreed.routes) = tensors;
    }
    __syncwarp();
    if (peer < call.world) {
      const uint32_t epoch = agreed.epoch;
      const uint64_t rows = agreed.sent[peer];
      const uint64_t all = rows_before(agreed.sent, call.world, given.rows);
      Message& from = agreed.routes.from[call.distance_to(peer, call.world)];
      from = rows_of(tensors.from[0], given.row_bytes, rows_before(agreed.sent, peer, given.rows),
                     rows);
      if (peer != call.rank) agreed.long_from = is_left<Ranks>(call, from);
      if (blockIdx.x == 0 && peer != call.rank && patience.alive()) {
        // A single relaxed word: it orders no other access.
        ptx::st_relaxed_sys(
            &call.header(peer)->counts[epoch & 1][call.rank],
            (all == kRefused ? kRefused : rows) << kCountEpochBits | (epoch & kEpochMask));
      }
      if (all == kRefused && peer == call.rank) {
        refuse(call, patience, Phase::counts, agreed.sent, given.rows);
      }
    }
    patience.agree();
  }

  /// Advances the epoch, in the last block that has read it. The thread is in a warp that does not
  /// wait for counts.
  static __device__ __forceinline__ void advance(const KernelCall& call, const Agreed& agreed) {
    RegionHeader* own = call.header();
    if (threadIdx.x + 1 == blockDim.x && atomicAdd(&own->counts_blocks, 1u) + 1 == gridDim.x) {
      own->counts_blocks = 0;
      own->counts_epoch = agreed.epoch;
    }
  }

  /// The number of rows from a peer.
  static __device__ __forceinline__ uint64_t count_of(const KernelCall& call, Patience& patience,
                                                      int peer, const Agreed& agreed) {
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
};

template <int W>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    alltoallv_device_splits_kernel(const __grid_constant__ KernelCall call,
                                   const __grid_constant__ Routes tensors,
                                   const __grid_constant__ DeviceSplits given) {
  using Splits = SplitChannels<World<W>::kRanks>;
  __shared__ Agreed agreed;
  Session<Splits> session(call, tensors, given, agreed);
  if (!session.alive()) return;
  const Routes& routes = agreed.routes;
  const auto meet = [&] { return Splits::meet(session, tensors, given, agreed); };
  const auto keep = [&](Slice slice) {
    if (W == 2 && (agreed.long_from || agreed.long_to)) return;
    copy_own(routes.from[0], routes.to[0], slice);
    clear(routes.cleared, slice);
  };
  run_one_way<Copy>(session, routes, World<W>::size(call), meet, keep);
}

}  // namespace collx::cuda
