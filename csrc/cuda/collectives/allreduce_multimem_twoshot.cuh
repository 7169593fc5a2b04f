// All-reduce, two-shot, by multicast: every rank loads the sum of its part over all inputs, and
// stores it to all ranks. Symmetric inputs are read directly. Other inputs are staged first.
//
// Cost: the tensor once on each link in each direction, and a barrier for each step of each chunk.
#pragma once

#include "multimem_parts.cuh"

namespace collx::cuda {

template <typename Stage, typename M, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, 2)
    allreduce_multimem_twoshot_kernel(const __grid_constant__ KernelCall call,
                                      const __grid_constant__ PullArguments pull,
                                      const __grid_constant__ MulticastArguments multicast,
                                      const __grid_constant__ Epilogue... epilogue) {
  using Every = EveryTensor<M, Stage::kDType>;
  Session<MulticastBarrier<M>> session(call, multicast);
  const bool staged = multicast.input == nullptr;

  const auto sum_of = [&](const Half& half, const PartPlace& at) {
    const Every from = staged ? staging_of_all<M, Stage::kDType>(call, pull, multicast, half.parity)
                              : Every({call, multicast.input, pull.input, 0}, call.numel);
    return from_sums(from, staged ? at.of_half : at.of_tensor);
  };
  run_parts<Stage, M>(session, pull, multicast, staged,
                      Stage::template output<false>(call.output, call.numel, epilogue...), sum_of);
}

}  // namespace collx::cuda
