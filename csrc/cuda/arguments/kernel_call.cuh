// The arguments of kernels, which are passed by value, and how threads divide the work.
//
// Arguments cost time in a small call: the launch copies them, and the first access to each line
// misses the constant cache. Therefore there are few arguments, and those that every call reads
// come first.
#pragma once

#include "../../protocol/call.h"
#include "../../protocol/integer_divisor.h"
#include "../ptx/memory.cuh"

namespace collx::cuda {

/// The ranks for which a kernel is compiled: it has registers for `kRanks` ranks and uses `size` of
/// them. W = 0: any number of ranks, by loops over the number of the call.
template <int W>
struct World {
  static constexpr int kRanks = W == 0 ? kMaxCudaRanks : W;
  /// The number of blocks of kFullBlock threads on a multiprocessor. One vector from each of eight
  /// ranks takes the registers that two blocks would share.
  static constexpr int kBlocksHeld = kRanks <= 4 ? 2 : 1;
  template <typename Call>
  static __device__ __forceinline__ int size(const Call& call) {
    return W == 0 ? call.world : W;
  }
};

struct KernelCall {
  const void* input;
  void* output;
  uint64_t numel;
  // The slot area for the algorithm and dtype, if the kernel pushes.
  TileEntry* entries;
  char* arriving;         // this rank's slots: stage 0, parity 0, sent by rank 0
  uint64_t vectors;       // vectors that each rank sends to each other rank in a stage
  uint32_t capacity;      // vectors in one use of all tiles
  uint32_t source_bytes;  // from the slots of one sender to those of the next sender
  uint32_t parity_bytes;  // from one parity to the other; twice that from stage to stage
  int32_t rank;
  int32_t world;
  ReduceOp reduce_op;
  PdlLevel pdl;
  bool check;
  uint32_t fingerprint;
  // By distance: d means rank (rank + d) % world.
  char* outgoing[kMaxCudaRanks];  // this rank's slots at each peer: stage 0, parity 0

  char* peer[kMaxCudaRanks];  // regions, by distance
  uint64_t timeout_ns;
  HostStatus* status;
  CallDescriptor descriptor;

  /// See NormArguments.
  __device__ __forceinline__ void touch() const {
    ptx::touch(input);
    ptx::touch(parity_bytes);
    ptx::touch(outgoing[3]);
    ptx::touch(peer[0]);
  }

  __device__ __forceinline__ char* own() const { return peer[0]; }
  __device__ __forceinline__ RegionHeader* header() const {
    return reinterpret_cast<RegionHeader*>(peer[0]);
  }
  /// The distance from this rank to rank `of`. `ranks`: the world size, a constant where it
  /// is known at compile time.
  __device__ __forceinline__ int distance_to(int of, int ranks) const {
    return of >= rank ? of - rank : of - rank + ranks;
  }
  __device__ __forceinline__ int rank_at(int distance, int ranks) const {
    const int at = rank + distance;
    return at < ranks ? at : at - ranks;
  }
  __device__ __forceinline__ char* region(int of) const { return peer[distance_to(of, world)]; }
  __device__ __forceinline__ RegionHeader* header(int of) const {
    return reinterpret_cast<RegionHeader*>(region(of));
  }
};

/// A second kernel argument of the kernels that pull. All arrays are by rank.
struct PullArguments {
  const void* input[kMaxCudaRanks];  // null if inputs are staged
  void* output[kMaxCudaRanks];       // null unless every rank's output is symmetric
  uint64_t staging;                  // offsets in the region, each of two halves
  uint64_t staging_bytes;
  uint64_t results;
  uint64_t result_bytes;

  /// The data that a rank has staged, and the results that it passes on.
  __device__ __forceinline__ Vector* staged(const KernelCall& call, int rank,
                                            uint32_t parity) const {
    return reinterpret_cast<Vector*>(call.region(rank) + staging + parity * staging_bytes);
  }
  __device__ __forceinline__ Vector* passed(const KernelCall& call, int rank,
                                            uint32_t parity) const {
    return reinterpret_cast<Vector*>(call.region(rank) + results + parity * result_bytes);
  }
};

/// A third kernel argument, of the kernels that use multicast: the multicast addresses.
struct MulticastArguments {
  char* region;
  char* input;   // null if inputs are staged
  char* output;  // null unless results go into the outputs of all ranks
};

/// Bytes of a tensor: one run, or runs of equal width with gaps between them.
struct Runs {
  char* data;
  uint64_t bytes;
  uint64_t gap;          // from the end of a run to the next one; 0: there is one run
  IntegerDivisor width;  // of a run, if there are gaps

  __device__ __forceinline__ char* address(uint64_t offset) const {
    return gap == 0 ? data + offset : data + offset + width.quotient(offset) * gap;
  }
};

/// Bytes that are sent to or received from a rank.
struct Message : Runs {
  uint64_t wire;  // vectors that it takes in slots; if masked, a multiple of a warp's vectors
  bool whole;     // vectors of 16 bytes are aligned, and none crosses the end of a run
};

/// The messages of a call, by distance; 0: the part that stays on this rank.
struct RouteMessages {
  // The data that is read: on this rank, or, if this rank pulls, on the peer.
  Message from[kMaxCudaRanks];
  // The destination: on this rank, or, if this rank pushes into tensors, on the peer.
  Message to[kMaxCudaRanks];
  Message cleared;  // set to zero
  Message kept;     // the input that stays on this rank as a whole, if from[0] is only a part of it
};

/// Properties that all messages of a call share.
struct RouteFrame {
  bool same;  // all of `from`, except this rank's own, are the same bytes
  bool has_root;
  int32_t root;  // distance of the root from this rank
  // Channels.
  uint32_t* uses_sent;      // by rank, kMaxCudaRanks for each tile
  uint32_t* uses_received;  // by rank
  uint32_t* uses_done;      // by rank; the receivers write it
  uint64_t done_offset;     // of uses_done in a region
};

/// A second kernel argument of the kernels that exchange messages.
struct Routes : RouteMessages, RouteFrame {};

/// Calls f(d) for each peer, by distance.
template <int Ranks, typename F>
__device__ __forceinline__ void for_peers(int world, F f) {
#pragma unroll
  for (int d = 1; d < Ranks; ++d) {
    if (d < world) f(d);
  }
}

/// Work that a block does slice by slice. A slice has at least four vectors for each thread, if
/// there are so many: with fewer loads in flight a thread mostly waits.
struct Slice {
  uint32_t part = 0;
  uint32_t parts = 1;
};

/// Calls f(i) for each of the first n indices that belongs to this thread, within a slice.
template <typename F>
__device__ __forceinline__ void for_own(uint64_t n, F f, Slice slice = {}) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  uint64_t each = n;
  if (slice.parts > 1) {
    // Slightly more than the exact part of n: an exact division takes longer than slices save.
    const float part = static_cast<float>(n) / static_cast<float>(slice.parts);
    each = round_up<uint64_t>(static_cast<uint64_t>(part * 1.0001f) + 1, kTileVectors);
    each = each < 4 * stride ? 4 * stride : each;
  }
  const uint64_t from = slice.part * each, to = from + each < n ? from + each : n;
  for (uint64_t i = from + uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < to; i += stride) {
    f(i);
  }
}

}  // namespace collx::cuda
