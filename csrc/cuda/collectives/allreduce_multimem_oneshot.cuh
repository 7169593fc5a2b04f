// All-reduce, one-shot, by multicast: every rank loads the sum of all inputs. Symmetric inputs are
// read directly. Other inputs, and inputs that the call overwrites, are staged in the region, in
// two alternating halves.
//
// Cost: the tensor once on each link in each direction, and two barriers.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/multicast.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, typename M, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, 2)
    allreduce_multimem_oneshot_kernel(const __grid_constant__ KernelCall call,
                                      const __grid_constant__ PullArguments pull,
                                      const __grid_constant__ MulticastArguments multicast,
                                      const __grid_constant__ Epilogue... epilogue) {
  using Every = EveryTensor<M, Stage::kDType>;
  Session<MulticastBarrier<M>> session(call, multicast);
  const DenseTensor<Stage::kElementBytes> input(call.input, call.numel);
  const auto output = Stage::template output<false>(call.output, call.numel, epilogue...);
  const bool staged = multicast.input == nullptr;

  const auto stage = [&](const Half& half) {
    Vector* to = pull.staged(call, call.rank, half.parity);
    for_own(half.count, [&](uint64_t i) { to[i] = input.load(half.first + i); });
  };
  const auto reduce = [&](const Half& half) {
    const Every inputs = staged
                             ? staging_of_all<M, Stage::kDType>(call, pull, multicast, half.parity)
                             : Every({call, multicast.input, pull.input, 0}, call.numel);
    for_own(half.count, [&](uint64_t i) {
      const uint64_t j = half.first + i;
      reduce_into<Stage>(call, call.world, from_sums(inputs, staged ? i : j),
                         TensorSink{output, j});
    });
  };
  const uint64_t most = staged ? pull.staging_bytes / kVectorBytes : input.vectors();
  run_barriers(session, !staged, input.vectors(), most, step(stage, Phase::stage_barrier, staged),
               step(reduce));
}

}  // namespace collx::cuda
