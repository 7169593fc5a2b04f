// All-reduce, one-shot, by pulling: every rank reads all inputs and reduces them for itself.
// Symmetric inputs are read where they are; others are staged in the region, two halves in turn,
// and so are those that the call overwrites.
//
// Costs W-1 times the tensor on each link, and two barriers.
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
  const Tensor input(call.input, call.numel), output(call.output, call.numel);
  const bool staged = pull.input[0] == nullptr;

  const auto stage = [&](const Half& half) {
    Vector* to = pull.staged(call, call.rank, half.parity);
    for_own(half.count, [&](uint64_t i) { to[i] = input.load(half.first + i); });
  };
  const auto reduce = [&](const Half& half) {
    for_own(half.count, [&](uint64_t i) {
      const uint64_t j = half.first + i;
      Vector v[kRanks];
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer >= world) continue;
        v[peer] = staged ? ptx::ld_relaxed_sys(pull.staged(call, peer, half.parity) + i)
                         : Tensor(pull.input[peer], call.numel).load_peer(j);
      }
      output.store(j, reduce_vectors<D>(v, world, call.reduce_op));
    });
  };
  const uint64_t most = staged ? pull.staging_bytes / kVectorBytes : input.vectors();
  run_barriers(session, !staged, input.vectors(), most, step(stage, Phase::stage_barrier, staged),
               step(reduce));
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all calls.
Kernel allreduce_oneshot_pull(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(oneshot_pull<D, W>); });
}

}  // namespace collx::cuda
