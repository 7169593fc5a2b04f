// A barrier of all ranks, in stream order: one block of one warp.
#include "../transports/schedules.cuh"
#include "kernel_table.h"

namespace collx::cuda {
namespace {

__global__ void __launch_bounds__(kFullBlock, World<0>::kBlocksHeld)
    rank_barrier_kernel(const __grid_constant__ KernelCall call) {
  Session<BlockBarrier> session(call);
  run_barriers(session, false, 0, 1);
}

}  // namespace

Kernel rank_barrier(const Instance&) { return as_kernel(rank_barrier_kernel); }

}  // namespace collx::cuda
