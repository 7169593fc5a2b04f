// All-reduce, one-shot, by pulling: every rank reads all inputs and reduces them itself. Symmetric
// inputs are read directly. Other inputs, and inputs that the call overwrites, are staged in the
// region, in two alternating halves.
//
// Cost: W-1 times the tensor on each link, and two barriers.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, int W, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    allreduce_oneshot_pull_kernel(const __grid_constant__ KernelCall call,
                                  const __grid_constant__ PullArguments pull,
                                  const __grid_constant__ Epilogue... epilogue) {
  using Tensor = DenseTensor<Stage::kElementBytes>;
  Session<BlockBarrier> session(call);
  const int world = World<W>::size(call);
  const Tensor input(call.input, call.numel);
  const auto output = Stage::template output<false>(call.output, call.numel, epilogue...);
  const bool staged = pull.input[0] == nullptr;

  const auto stage = [&](const Half& half) {
    Vector* to = pull.staged(call, call.rank, half.parity);
    for_own(half.count, [&](uint64_t i) { to[i] = input.load(half.first + i); });
  };
  const auto reduce = [&](const Half& half) {
    for_own(half.count, [&](uint64_t i) {
      const uint64_t j = half.first + i;
      const auto inputs = from_memory<World<W>::kRanks>(world, [&](int rank) {
        return staged ? ptx::ld_relaxed_sys(pull.staged(call, rank, half.parity) + i)
                      : Tensor(pull.input[rank], call.numel).load_peer(j);
      });
      reduce_into<Stage>(call, world, inputs, TensorSink{output, j});
    });
  };
  const uint64_t most = staged ? pull.staging_bytes / kVectorBytes : input.vectors();
  run_barriers(session, !staged, input.vectors(), most, step(stage, Phase::stage_barrier, staged),
               step(reduce));
}

}  // namespace collx::cuda
