// Alltoallv whose splits lie in device memory: the ranks tell each other how many rows they are
// about to send, then go on as any collective over channels.
//
// The counts travel as words {rows, epoch} in a mailbox that every call uses in both directions
// between all ranks, so two of them suffice. Every block reads all counts for itself.
#pragma once

#include "one_way.cuh"

namespace collx::cuda {

constexpr uint64_t kEpochMask = (1ull << kCountEpochBits) - 1;
constexpr uint64_t kRefused = ~0ull >> kCountEpochBits;  // sent instead of rows

struct Splits {
  int64_t sent[kMaxCudaRanks];      // by rank
  int64_t received[kMaxCudaRanks];  // likewise
};

/// The rows that the splits send, or kRefused when they do not fit the input.
__device__ __forceinline__ uint64_t sum_of(const DeviceSplits& given, int world) {
  uint64_t sum = 0;
  for (int r = 0; r < world; ++r) {
    // Each by itself, since a sum may wrap around.
    const auto rows = static_cast<uint64_t>(given.sent[r]);
    if (rows > given.rows) return kRefused;
    sum += rows;
  }
  return sum <= given.rows ? sum : kRefused;
}

/// By thread r < world of each block: rows for and from rank r.
__device__ __forceinline__ void exchange_counts(const KernelCall& call, Patience& patience,
                                                const DeviceSplits& given, Splits& splits) {
  RegionHeader* own = call.header();
  const uint32_t epoch = *reinterpret_cast<volatile uint32_t*>(&own->counts_epoch) + 1;
  const uint64_t mark = epoch & kEpochMask;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < call.world) {
    const int64_t rows = given.sent[peer];
    splits.sent[peer] = rows;
    splits.received[peer] = rows;
    if (peer != call.rank && patience.alive()) {
      if (blockIdx.x == 0) {
        const bool refused = sum_of(given, call.world) == kRefused;
        const uint64_t sent = refused ? kRefused : static_cast<uint64_t>(rows);
        ptx::st_release_sys(&call.header(peer)->counts[epoch & 1][call.rank],
                            sent << kCountEpochBits | mark);
      }
      uint64_t seen = 0;
      patience.wait(
          Phase::counts,
          [&] {
            seen = ptx::ld_acquire_sys(&own->counts[epoch & 1][peer]);
            return (seen & kEpochMask) == mark;
          },
          [&] {
            return Blame{peer, mark, seen & kEpochMask};
          });
      splits.received[peer] = static_cast<int64_t>(seen >> kCountEpochBits);
      // Who refuses its splits reports it: wait for that, instead of failing by what follows.
      if (seen >> kCountEpochBits == kRefused) {
        patience.wait(
            Phase::counts, [] { return false; },
            [&] {
              return Blame{peer, mark, seen & kEpochMask};
            });
      }
    }
  }
  patience.agree();
  if (threadIdx.x == 0 && atomicAdd(&own->counts_blocks, 1u) + 1 == gridDim.x) {
    own->counts_blocks = 0;
    own->counts_epoch = epoch;
  }
}

/// By one thread: whether the splits fit the tensors.
__device__ __forceinline__ bool check(const KernelCall& call, Patience& patience,
                                      const DeviceSplits& given, const Splits& splits) {
  uint64_t received = 0;
  for (int r = 0; r < call.world; ++r) received += static_cast<uint64_t>(splits.received[r]);
  const uint64_t sent = sum_of(given, call.world);
  const bool valid = sent != kRefused;
  const bool fit = valid && received <= given.capacity;
  if (!fit && patience.alive()) {
    patience.fail(Failure::splits, valid ? Phase::arrival : Phase::counts,
                  Blame{call.rank, valid ? given.capacity : given.rows, valid ? received : sent});
  }
  return fit;
}

__device__ __forceinline__ Message rows_of(const Message& tensor, uint64_t row_bytes,
                                           uint64_t start, uint64_t rows) {
  Message m = tensor;
  m.data += start * row_bytes;
  m.bytes = m.width = m.pitch = rows * row_bytes;
  m.whole = tensor.whole && start * row_bytes % kVectorBytes == 0;
  m.wire = wire_vectors(true, Run<>(m).vectors());
  return m;
}

/// By one thread: the messages. Returns the vectors of the longest.
__device__ __forceinline__ uint64_t lay_out(const KernelCall& call, const DeviceSplits& given,
                                            const Splits& splits, const Routes& tensors,
                                            Routes& routes) {
  uint64_t from = 0, to = 0, vectors = 0;
  for (int rank = 0; rank < call.world; ++rank) {
    const int d = call.distance_to(rank, call.world);
    const auto sent = static_cast<uint64_t>(splits.sent[rank]);
    const auto received = static_cast<uint64_t>(splits.received[rank]);
    routes.from[d] = rows_of(tensors.from[0], given.row_bytes, from, sent);
    routes.to[d] = rows_of(tensors.to[0], given.row_bytes, to, received);
    from += sent;
    to += received;
    if (blockIdx.x == 0) given.received[rank] = splits.received[rank];
    if (d > 0) vectors = max(vectors, max(routes.from[d].wire, routes.to[d].wire));
  }
  routes.cleared = rows_of(tensors.to[0], given.row_bytes, to, given.capacity - to);
  return vectors;
}

/// In memory of the block.
struct Agreed {
  Splits splits;
  Routes routes;
  uint64_t vectors;
};

/// Channels of which the routes are made first. Where the splits do not fit, the block has failed.
template <int Ranks>
class AgreedChannels : public Channels<Ranks, false> {
 public:
  using Transport::pairs;
  __device__ __forceinline__ AgreedChannels(const KernelCall& call, Patience& patience,
                                            const Routes& tensors, const DeviceSplits& given,
                                            Agreed& agreed)
      : Channels<Ranks, false>(call, patience, agree(call, patience, tensors, given, agreed),
                               agreed.vectors) {}

 private:
  static __device__ __forceinline__ const Routes& agree(const KernelCall& call, Patience& patience,
                                                        const Routes& tensors,
                                                        const DeviceSplits& given, Agreed& agreed) {
    exchange_counts(call, patience, given, agreed.splits);
    if (threadIdx.x == 0) {
      agreed.routes = tensors;
      const bool fit = check(call, patience, given, agreed.splits);
      agreed.vectors = fit ? lay_out(call, given, agreed.splits, tensors, agreed.routes) : 0;
    }
    __syncthreads();
    patience.agree();
    return agreed.routes;
  }
};

template <int W>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    alltoallv_device_splits_kernel(const __grid_constant__ KernelCall call,
                                   const __grid_constant__ Routes tensors,
                                   const __grid_constant__ DeviceSplits given) {
  __shared__ Agreed agreed;
  Session<AgreedChannels<World<W>::kRanks>> session(call, tensors, given, agreed);
  if (session.alive()) run_one_way<Copy>(session, agreed.routes, World<W>::size(call));
}

}  // namespace collx::cuda
