// What arrives at a kernel, by value, and how its threads divide it.
//
// A small call pays for its arguments: the launch copies them, and each line of them that is
// touched misses the constant cache once. So there are few, and what every call reads stands at
// the front.
#pragma once

#include "../../protocol/call.h"
#include "../ptx/memory.cuh"

namespace collx::cuda {

/// The ranks that a kernel is compiled for: `kRanks` registers' worth, `size` of them used. 0: any
/// number, by loops that look how many there are.
template <int W>
struct World {
  static constexpr int kRanks = W == 0 ? kMaxCudaRanks : W;
  /// Blocks of kFullBlock threads on a multiprocessor. A vector of each of eight ranks takes the
  /// registers that two blocks would share.
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
  // Of the slot area for algorithm and dtype, where it pushes.
  TileEntry* entries;
  char* arriving;         // this rank's slots: stage 0, parity 0, sent by rank 0
  uint64_t vectors;       // that each rank sends to each, per stage
  uint32_t capacity;      // of them in one use of all tiles
  uint32_t source_bytes;  // from the slots of one sender to those of the next
  uint32_t parity_bytes;  // from one parity to the other; twice that from stage to stage
  int32_t rank;
  int32_t world;
  ReduceOp reduce_op;
  PdlLevel pdl;
  bool check;
  uint32_t fingerprint;
  // By distance: d stands for rank (rank + d) % world.
  char* outgoing[kMaxCudaRanks];  // this rank's slots at each peer: stage 0, parity 0

  char* peer[kMaxCudaRanks];  // regions, likewise
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
  /// How far behind this rank another one stands. `ranks`: the world, where the compiler knows it.
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

/// A second argument, for the kernels that pull. All by rank.
struct PullArguments {
  const void* input[kMaxCudaRanks];  // null where inputs are staged
  void* output[kMaxCudaRanks];       // null unless every rank's output is symmetric
  uint64_t staging;                  // offsets in the region, each of two halves
  uint64_t staging_bytes;
  uint64_t results;
  uint64_t result_bytes;

  /// What a rank has staged, and what it passes on.
  __device__ __forceinline__ Vector* staged(const KernelCall& call, int rank,
                                            uint32_t parity) const {
    return reinterpret_cast<Vector*>(call.region(rank) + staging + parity * staging_bytes);
  }
  __device__ __forceinline__ Vector* passed(const KernelCall& call, int rank,
                                            uint32_t parity) const {
    return reinterpret_cast<Vector*>(call.region(rank) + results + parity * result_bytes);
  }
};

/// A third one, for those that go through multicast: where the memory of all ranks is at once.
struct MulticastArguments {
  char* region;
  char* input;   // null where inputs are staged
  char* output;  // null unless results go into the outputs of all ranks
};

/// Bytes inside of a tensor that go to a rank or come from it: runs of `width` bytes, `pitch`
/// apart.
struct Message {
  char* data;
  uint64_t bytes;
  uint64_t width;
  uint64_t pitch;
  uint64_t wire;  // vectors that it takes in slots, a whole number of warps' worth where masked
  uint32_t unit;  // bytes of an element, of which address, width and pitch are multiples; up to 8
  bool whole;     // vectors of 16 bytes are aligned, and none reaches over the end of a run
};

/// By distance, 0 for what stays here.
struct RouteMessages {
  // What is read: this rank's, or, where it pulls, what it takes there.
  Message from[kMaxCudaRanks];
  // Where it is stored: this rank's, or, where it pushes into tensors, there.
  Message to[kMaxCudaRanks];
  Message cleared;  // set to zero
  Message kept;     // the input of which all stays here, where from[0] is a part of it
};

/// What they have in common.
struct RouteFrame {
  bool same;  // all of `from`, but the own one, are the same bytes
  bool has_root;
  int32_t root;  // distance of the root from this rank
  // Channels.
  uint32_t* uses_sent;      // by rank, kMaxCudaRanks a tile
  uint32_t* uses_received;  // likewise
  uint32_t* uses_done;      // likewise; the receivers write it
  uint64_t done_offset;     // of uses_done in a region
};

/// A second argument, for the kernels that exchange messages.
struct Routes : RouteMessages, RouteFrame {};

/// f(d) for each peer, by distance.
template <int Ranks, typename F>
__device__ __forceinline__ void for_peers(int world, F f) {
#pragma unroll
  for (int d = 1; d < Ranks; ++d) {
    if (d < world) f(d);
  }
}

/// A part of some work, of which all parts are done one after the other. It has four vectors of
/// each thread, if there are so many: with less under way at once a thread mostly waits.
struct Slice {
  uint32_t part = 0;
  uint32_t parts = 1;
};

/// f(i) for each of the first n that is this thread's, in a slice of them.
template <typename F>
__device__ __forceinline__ void for_own(uint64_t n, F f, Slice slice = {}) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  uint64_t each = n;
  if (slice.parts > 1) {
    // A part of n and a little more: dividing exactly takes longer than what slices save.
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
