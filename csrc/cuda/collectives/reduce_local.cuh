// Reduction of tensors that are already on this rank, for the fallback.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/sinks.cuh"
#include "../transports/sources.cuh"

namespace collx::cuda {

/// The tensors of all ranks, by rank.
struct GatheredTensors {
  const void* input[kMaxRanks];
  void* output;
  uint64_t numel;
  ReduceOp reduce_op;
  int32_t world;
};

template <typename Stage>
__global__ void reduce_local_kernel(const __grid_constant__ GatheredTensors call) {
  using Tensor = DenseTensor<Stage::kElementBytes>;
  const Tensor output(call.output, call.numel);
  for_own(output.vectors(), [&](uint64_t i) {
    const auto inputs = from_memory<kMaxRanks>(
        call.world, [&](int rank) { return Tensor(call.input[rank], call.numel).load(i); });
    reduce_into<Stage>(call, call.world, inputs, TensorSink{output, i});
  });
}

}  // namespace collx::cuda
