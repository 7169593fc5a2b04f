// Copies between the ranks' own tensors: every rank stores its messages directly into the peers'
// symmetric outputs. One loop between two barriers, without intermediate copies.
//
// Cost: the messages on each link. No rank writes data that a peer still reads: the first barrier
// states that all outputs may be written, and the last one that all of them have been written.
#pragma once

#include "../arguments/vectors.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

/// Stores all messages, of at most `vectors` vectors. `Plain`: every message is one run of whole
/// aligned vectors.
template <int W, bool Plain>
__device__ __forceinline__ void store_messages(const KernelCall& call, const Routes& routes,
                                               uint64_t vectors) {
  constexpr int kRanks = World<W>::kRanks;
  constexpr int kInFlight = 4;  // vectors for each thread
  const int world = World<W>::size(call);
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t mine = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  Vector v[kInFlight];
  for (uint64_t i = mine; i < vectors; i += kInFlight * stride) {
#pragma unroll(Plain ? kRanks : 1)
    for (int hop = 0; hop < kRanks; ++hop) {
      // The copy within this rank comes last, because the links take the most time.
      const int d = hop + 1 < world ? hop + 1 : 0;
      if (hop >= world) continue;
      if (hop == 0 || d == 0 || !routes.same) {
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) v[k] = load<Plain>(routes.from[d], i + k * stride);
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) store<Plain>(routes.to[d], i + k * stride, v[k]);
    }
  }
  clear(routes.cleared);
}

template <int W, bool Plain>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    gather_scatter_direct_kernel(const __grid_constant__ KernelCall call,
                                 const __grid_constant__ Routes routes) {
  Session<BlockBarrier> session(call);
  run_between_barriers(session, [&] { store_messages<W, Plain>(call, routes, call.vectors); });
}

}  // namespace collx::cuda
