// A barrier of all ranks, in stream order: one block of one warp.
#include "../transports/barrier.cuh"
#include "../transports/session.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    meet(const __grid_constant__ KernelCall call) {
  Session<false> session(call);
  BlockBarrier barrier(call, session.patience);
  barrier.sync(Phase::end_barrier);
  barrier.finish();
  session.finish();
}

}  // namespace

Kernel rank_barrier(const Instance&) { return as_kernel(meet); }

}  // namespace collx::cuda
