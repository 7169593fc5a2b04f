// Alltoallv into symmetric outputs: every rank stores its messages directly into the peers'
// outputs. Only the receiver knows where a message begins in its output, so it tells the sender
// before. With splits in device memory, the sender has told the receiver the number of rows before
// that.
//
// Cost: the messages on each link; two waits for all ranks, or three with splits in device memory.
// The receiver's words state that its output may be written, like the first barrier of other direct
// copies. The barrier at the end states that all outputs have been written.
#pragma once

#include "gather_scatter_direct.cuh"
#include "split_counts.cuh"

namespace collx::cuda {

/// The barrier at the end. In checked mode, the two ranks of a message compare its length.
class PairBarrier : public BlockBarrier {
 public:
  static __device__ __forceinline__ const Routes* pairs(const Routes& routes) { return &routes; }
  __device__ __forceinline__ PairBarrier(const KernelCall& call, const Patience& patience,
                                         const Routes&)
      : BlockBarrier(call, patience) {}
};

/// Takes the messages of a call with splits on the host.
__device__ __forceinline__ void take_messages(const KernelCall& call, const Routes& given,
                                              Agreed& agreed) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < call.world) {
    const int d = call.distance_to(peer, call.world);
    agreed.routes.from[d] = given.from[d];
    agreed.routes.to[d] = given.to[d];
  } else if (peer == kWarpLanes) {
    static_cast<RouteFrame&>(agreed.routes) = given;
    agreed.routes.cleared = given.cleared;
  }
}

/// Tells each sender where its message begins in this rank's output, and learns the same from each
/// receiver. Afterwards the messages to other ranks have their destinations in the peers' outputs.
/// Every call uses the words in both directions between all ranks, so two for each are sufficient.
__device__ __forceinline__ bool exchange_destinations(const KernelCall& call, Patience& patience,
                                                      const PullArguments& tensors,
                                                      Agreed& agreed) {
  RegionHeader* own = call.header();
  const uint32_t epoch = ptx::ld_here(&own->destinations_epoch) + 1;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < call.world && peer != call.rank && patience.alive()) {
    const int d = call.distance_to(peer, call.world);
    const Message& from = agreed.routes.from[d];
    Message& to = agreed.routes.to[d];
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32 |
                          pair_fingerprint(call.fingerprint, call.rank, peer, from.bytes, to.bytes);
    if (blockIdx.x == 0) {
      Destination& told = call.header(peer)->destinations[epoch & 1][call.rank];
      const char* const output = static_cast<const char*>(call.output);
      ptx::st_relaxed_sys(&told.offset, static_cast<uint64_t>(to.data - output));
      ptx::st_release_sys(&told.flag, flag);
    }
    const Destination& told = own->destinations[epoch & 1][peer];
    uint64_t seen = 0;
    const bool arrived = patience.wait(
        Phase::start_barrier,
        [&] {
          seen = ptx::ld_acquire_sys(&told.flag);
          return seen >> 32 == epoch;
        },
        [&] {
          return Blame{peer, epoch, seen >> 32};
        });
    if (arrived && seen != flag) {
      patience.fail(Failure::mismatch, Phase::start_barrier, Blame{peer, flag & ~0u, seen & ~0u});
    }
    to = from;
    to.data = static_cast<char*>(tensors.output[peer]) + ptx::ld_relaxed_sys(&told.offset);
    to.whole = reinterpret_cast<uint64_t>(to.data) % kVectorBytes == 0;
  }
  const bool met = patience.agree();
  if (threadIdx.x == 0) advance(own->destinations_epoch, own->destinations_blocks, epoch);
  return met;
}

/// `given`: the splits in device memory, if there are any.
template <int W, bool Plain>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    alltoallv_direct_kernel(const __grid_constant__ KernelCall call,
                            const __grid_constant__ Routes tensors,
                            const __grid_constant__ PullArguments pull,
                            const __grid_constant__ DeviceSplits given) {
  __shared__ Agreed agreed;
  Session<PairBarrier> session(call, tensors);
  Patience& patience = session.patience;
  if (given.sent == nullptr) {
    take_messages(call, tensors, agreed);
  } else {
    const auto nothing_more = [](int) {};
    constexpr int kRanks = World<W>::kRanks;
    announce_counts<kRanks>(call, patience, tensors, given, agreed, nothing_more);
    patience.agree();
    advance_counts(call, agreed);
    await_counts<kRanks>(call, patience, tensors, given, agreed, nothing_more);
  }
  if (!patience.agree() || !exchange_destinations(call, patience, pull, agreed)) return;
  const int world = World<W>::size(call);
  uint64_t vectors = 0;
  for (int d = 0; d < world; ++d) {
    vectors = max(vectors, Run<>(agreed.routes.from[d]).vectors());
  }
  store_messages<W, Plain>(call, agreed.routes, vectors);
  session.transport.sync(patience, Phase::end_barrier);
}

}  // namespace collx::cuda
