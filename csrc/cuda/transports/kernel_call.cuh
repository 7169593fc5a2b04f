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
  SlotArea area;  // of the algorithm and dtype, where it pushes
  int32_t rank;
  int32_t world;
  ReduceOp reduce_op;
  PdlLevel pdl;
  bool check;
  uint32_t fingerprint;
  char* peer[kMaxCudaRanks];  // regions by distance: peer[d] is that of rank (rank + d) % world

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
