// Alltoallv whose splits lie in device memory. The ranks tell each other how many rows they are
// about to send, and send them through channels at the same time. A rank waits for rows when it has
// the counts. Between two ranks a long message is left to a second kernel (alltoallv_long.cuh): the
// sender and the receiver both know its length then.
//
// The counts travel as words {rows, epoch} in a mailbox that every call uses in both directions
// between all ranks, so two of them suffice. Every block reads all counts for itself.
#pragma once

#include "device_rows.cuh"
#include "one_way.cuh"

namespace collx::cuda {

constexpr uint64_t kEpochMask = (1ull << kCountEpochBits) - 1;
constexpr uint64_t kRefused = ~0ull >> kCountEpochBits;  // sent instead of rows

/// In memory of the block.
struct Agreed {
  uint64_t sent[kMaxCudaRanks];      // rows, by rank
  uint64_t received[kMaxCudaRanks];  // likewise
  uint32_t epoch;                    // of the counts
  bool long_from, long_to;           // whether the message to the peer, or from it, is left
  Routes routes;
};

/// The rows of all ranks before one, of all where it is the number of ranks: kRefused when they do
/// not fit.
__device__ __forceinline__ uint64_t rows_before(const uint64_t* rows, int rank, uint64_t capacity) {
  uint64_t sum = 0;
  for (int r = 0; r < rank; ++r) {
    // Each by itself, since a sum may wrap around.
    if (rows[r] > capacity) return kRefused;
    sum += rows[r];
  }
  return sum <= capacity ? sum : kRefused;
}

/// Of splits that do not fit.
__device__ __forceinline__ void refuse(const KernelCall& call, Patience& patience, Phase phase,
                                       const uint64_t* rows, uint64_t capacity) {
  if (!patience.alive()) return;
  uint64_t sum = 0;
  for (int r = 0; r < call.world; ++r) sum += rows[r];
  patience.fail(Failure::splits, phase, Blame{call.rank, capacity, sum});
}

/// Of messages to others, or from them.
__device__ __forceinline__ uint64_t most_vectors(const Message* messages, int world) {
  uint64_t vectors = 0;
  for (int d = 1; d < world; ++d) vectors = max(vectors, messages[d].wire);
  return vectors;
}

/// Whether a message is left to the second kernel. Then it takes nothing of the channels.
template <int Ranks>
__device__ __forceinline__ bool is_left(const KernelCall& call, Message& m) {
  if (Ranks > 2 || !is_long(m.wire, call.capacity)) return false;
  m.wire = 0;
  return true;
}

/// Channels whose messages become known on the way: first what this rank sends, then what it gets.
/// Thread r < world of each block sees to rank r. The counts of more than two ranks take registers
/// that the vectors need.
template <int Ranks>
class SplitChannels : public Channels<Ranks, false, Ranks == 2> {
  using Base = Channels<Ranks, false, Ranks == 2>;

 public:
  using Transport::pairs;
  /// Tells the others what they get. Where the splits do not fit the input, the block has failed.
  __device__ __forceinline__ SplitChannels(const KernelCall& call, Patience& patience,
                                           const Routes& tensors, const DeviceSplits& given,
                                           Agreed& agreed)
      : Base(call, patience, agreed.routes, 0, tensors) {
    announce(call, patience, tensors, given, agreed);
    this->extend(most_vectors(agreed.routes.from, call.world));
  }

  /// Waits for the counts, and lays out what comes. False, where it does not fit the output.
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
    // The thread behind the last rank's does the same for what is behind the last row.
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
        // One word, which orders nothing.
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

  /// Advances the epoch, by the last block to have read it. Of a warp that awaits no counts.
  static __device__ __forceinline__ void advance(const KernelCall& call, const Agreed& agreed) {
    RegionHeader* own = call.header();
    if (threadIdx.x + 1 == blockDim.x && atomicAdd(&own->counts_blocks, 1u) + 1 == gridDim.x) {
      own->counts_blocks = 0;
      own->counts_epoch = agreed.epoch;
    }
  }

  /// Rows from a peer.
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
    // Who refuses its splits reports it: wait for that, instead of failing by what follows.
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
