// A barrier of all ranks, in stream order: one block of one warp.
#include "../transports/barrier.cuh"
#include "kernel_table.h"

namespace collx::cuda {
namespace {

/// The barrier before the copies of a call. The barrier after the copies counts the call.
class EntryBarrier : public BlockBarrier {
 public:
  using BlockBarrier::BlockBarrier;
  static constexpr bool kCounts = false;
};

template <typename Barrier, Phase kPhase>
__global__ void __launch_bounds__(kFullBlock, World<0>::kBlocksHeld)
    rank_barrier_kernel(const __grid_constant__ KernelCall call) {
  Session<Barrier> session(call);
  session.transport.sync(session.patience, kPhase);
}

}  // namespace

Kernel rank_entry(const Instance&) {
  return as_kernel(rank_barrier_kernel<EntryBarrier, Phase::start_barrier>);
}
Kernel rank_barrier(const Instance&) {
  return as_kernel(rank_barrier_kernel<BlockBarrier, Phase::end_barrier>);
}

}  // namespace collx::cuda
