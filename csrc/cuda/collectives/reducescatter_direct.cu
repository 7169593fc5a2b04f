// Reducescatter and reduce on symmetric inputs: a rank pulls what it has to reduce from the peers'
// inputs. One loop between two barriers, no copy in between.
//
// Costs the messages on each link. The last barrier says that all inputs may be overwritten.
#include "../stages/messages.cuh"
#include "../transports/barrier.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    pull(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  constexpr int kRanks = World<W>::kRanks;
  Session<false> session(call);
  const int world = World<W>::size(call);
  BlockBarrier barrier(call, session.patience);

  if (barrier.sync(Phase::start_barrier)) {
    const bool reduces = !routes.has_root || routes.root == 0;
    const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
    const uint64_t mine = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (uint64_t i = mine; reduces && i < call.vectors; i += stride) {
      Vector v[kRanks];
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank < world) v[rank] = load_peer(routes.received[rank], i);
      }
      store(routes.sent[0], i, reduce_vectors<D>(v, world, call.reduce_op));
    }
    if (!reduces) copy_own(routes.received[call.rank], routes.sent[0]);
    barrier.sync(Phase::end_barrier);
  }
  barrier.finish();
  session.finish();
}

}  // namespace

Kernel reducescatter_direct(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(pull<D, W>); });
}

}  // namespace collx::cuda
