// All-reduce on symmetric tensors: the owner of a part pulls it from every peer's input, reduces,
// and stores the result into every peer's output. One loop between two barriers, no copy.
//
// Costs 2 (W-1)/W of the tensor on each link. Input and output may be the same tensor: an element
// is read and written by its owner alone.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    pull_push(const __grid_constant__ KernelCall call, const __grid_constant__ PullArguments pull) {
  using Tensor = VectorTensor<dtype_size(D)>;
  constexpr int kRanks = World<W>::kRanks;
  Session<false> session(call);
  const int world = World<W>::size(call), rank = call.rank;
  const Part part = partition(Tensor(call.input, call.numel).vectors(), world, rank);

  run_between_barriers(session, [&] {
    for_own(part.count, [&](uint64_t i) {
      Vector v[kRanks];
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer < world) {
          v[peer] = Tensor(pull.input[peer], call.numel).load_peer(part.start + i);
        }
      }
      const Vector sum = reduce_vectors<D>(v, world, call.reduce_op);
#pragma unroll
      for (int hop = 0; hop < kRanks; ++hop) {
        if (hop < world) {
          Tensor(pull.output[(rank + hop) % world], call.numel).store(part.start + i, sum);
        }
      }
    });
  });
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all calls.
Kernel allreduce_pull_push(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(pull_push<D, W>); });
}

}  // namespace collx::cuda
