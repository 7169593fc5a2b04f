// Reducescatter and reduce on symmetric inputs: a rank pulls what it has to reduce from the peers'
// inputs. One loop between two barriers, no copy in between.
//
// Costs the messages on each link. The last barrier says that all inputs may be overwritten.
#include "../stages/combine.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    pull(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  constexpr int kRanks = World<W>::kRanks;
  Session<false> session(call);
  const int world = World<W>::size(call);
  const bool reduces = !routes.has_root || routes.root == 0;

  run_between_barriers(session, [&] {
    if (!reduces) return copy_own(routes.from[0], routes.to[0]);
    for_own(call.vectors, [&](uint64_t i) {
      Vector v[kRanks];
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank < world) v[rank] = load_peer(routes.from[distance_to(call, world, rank)], i);
      }
      store(routes.to[0], i, reduce_vectors<D>(v, world, call.reduce_op));
    });
  });
}

}  // namespace

Kernel reducescatter_direct(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(pull<D, W>); });
}

}  // namespace collx::cuda
