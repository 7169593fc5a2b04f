// All-reduce, one-shot, by pulling: every rank reads all inputs and reduces them for itself.
// Symmetric inputs are read where they are; others are staged in the region, two halves in turn,
// and so are those that the call overwrites.
//
// Costs W-1 times the tensor on each link, and two barriers.
#include "../transports/barrier.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    oneshot_pull(const __grid_constant__ KernelCall call,
                 const __grid_constant__ PullArguments pull) {
  using Tensor = VectorTensor<dtype_size(D)>;
  constexpr int kRanks = World<W>::kRanks;
  Session<false> session(call);
  const int world = World<W>::size(call);
  BlockBarrier barrier(call, session.patience);
  const Tensor input(call.input, call.numel), output(call.output, call.numel);

  const bool staged = pull.input[0] == nullptr;
  const uint64_t chunk =
      staged ? pull.staging_bytes / kVectorBytes : (input.vectors() ? input.vectors() : 1);
  const uint64_t stride = gridDim.x * blockDim.x;
  bool going = true;
  uint32_t half = 0;
  for (uint64_t done = 0; done < input.vectors() && going; done += chunk, half ^= 1) {
    const uint64_t left = input.vectors() - done, n = left < chunk ? left : chunk;
    const uint64_t mine = blockIdx.x * blockDim.x + threadIdx.x;
    const uint64_t staging = pull.staging + half * pull.staging_bytes;
    if (staged) {
      Vector* to = reinterpret_cast<Vector*>(call.own() + staging);
      for (uint64_t i = mine; i < n; i += stride) to[i] = input.load(done + i);
    }
    // A half is written again only two barriers later, when all peers have read it.
    going = barrier.sync(staged ? Phase::stage_barrier : Phase::start_barrier);
    for (uint64_t i = mine; i < n && going; i += stride) {
      Vector v[kRanks];
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer >= world) continue;
        v[peer] = staged ? ptx::ld_relaxed_sys(
                               reinterpret_cast<const Vector*>(pull.region[peer] + staging) + i)
                         : Tensor(pull.input[peer], call.numel).load_peer(done + i);
      }
      output.store(done + i, reduce_vectors<D>(v, world, call.reduce_op));
    }
  }
  if (going) barrier.sync(Phase::end_barrier);
  barrier.finish();
  session.finish();
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all calls.
Kernel allreduce_oneshot_pull(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(oneshot_pull<D, W>); });
}

}  // namespace collx::cuda
