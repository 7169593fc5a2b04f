// A barrier of all ranks, in stream order: one block of one warp.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    meet(const __grid_constant__ KernelCall call) {
  Session<false> session(call);
  run_barriers(session, false, 0, 1);
}

}  // namespace

Kernel rank_barrier(const Instance&) { return as_kernel(meet); }

}  // namespace collx::cuda
