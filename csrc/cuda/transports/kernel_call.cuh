// What arrives at a kernel, by value.
//
// A small call pays for its arguments: the launch copies them, and each line of them that is
// touched misses the constant cache once. So there are few, and what every call reads stands at
// the front.
#pragma once

#include "../../protocol/call.h"

namespace collx::cuda {

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

  __device__ __forceinline__ char* own() const { return peer[0]; }
  __device__ __forceinline__ RegionHeader* header() const {
    return reinterpret_cast<RegionHeader*>(peer[0]);
  }
  __device__ __forceinline__ char* region(int of) const {
    return peer[of >= rank ? of - rank : of - rank + world];
  }
  __device__ __forceinline__ RegionHeader* header(int of) const {
    return reinterpret_cast<RegionHeader*>(region(of));
  }
};

/// A second argument, for the kernels that pull. All by rank.
struct PullArguments {
  char* region[kMaxCudaRanks];
  const void* input[kMaxCudaRanks];  // null unless every rank's input is symmetric
  void* output[kMaxCudaRanks];       // likewise
  uint64_t staging;                  // offsets in the region, each of two halves
  uint64_t staging_bytes;
  uint64_t results;
  uint64_t result_bytes;
};

}  // namespace collx::cuda
