// All-reduce, two-shot, with multicast in the second half: every rank pulls its part from the
// peers' inputs, reduces it in rank order, and stores it to all ranks at once. Symmetric inputs are
// pulled directly. Other inputs are staged first.
//
// Cost: (W-1)/W of the tensor on each link, then 1/W of it out and all of it in, and a barrier for
// each step of each chunk.
#pragma once

#include "multimem_parts.cuh"

namespace collx::cuda {

template <typename Stage, int W, typename M, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    allreduce_multimem_gather_kernel(const __grid_constant__ KernelCall call,
                                     const __grid_constant__ PullArguments pull,
                                     const __grid_constant__ MulticastArguments multicast,
                                     const __grid_constant__ Epilogue... epilogue) {
  using Tensor = DenseTensor<Stage::kElementBytes>;
  Session<MulticastBarrier<M>> session(call, multicast);
  const bool staged = pull.input[0] == nullptr;

  const auto inputs_of = [&](const Half& half, const PartPlace& at) {
    return from_memory<World<W>::kRanks>(World<W>::size(call), [&, half, at](int rank) {
      return staged ? ptx::ld_relaxed_sys(pull.staged(call, rank, half.parity) + at.of_half)
                    : Tensor(pull.input[rank], call.numel).load_peer(at.of_tensor);
    });
  };
  run_parts<Stage, M>(session, pull, multicast, staged,
                      Stage::template output<false>(call.output, call.numel, epilogue...),
                      inputs_of);
}

}  // namespace collx::cuda
