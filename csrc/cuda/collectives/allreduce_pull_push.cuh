// All-reduce on symmetric tensors: the owner of a part pulls it from every peer's input, reduces
// it, and stores the result into every peer's output. One loop between two barriers, without
// copies.
//
// Cost: 2 (W-1)/W of the tensor on each link. Input and output may be the same tensor: only the
// owner of an element reads and writes it.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, int W>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    allreduce_pull_push_kernel(const __grid_constant__ KernelCall call,
                               const __grid_constant__ PullArguments pull) {
  using Tensor = DenseTensor<Stage::kElementBytes>;
  constexpr int kRanks = World<W>::kRanks;
  Session<BlockBarrier> session(call);
  const int world = World<W>::size(call);
  const Part part = partition(Tensor(call.input, call.numel).vectors(), world, call.rank);

  run_between_barriers(session, [&] {
    for_own(part.count, [&](uint64_t i) {
      const uint64_t j = part.start + i;
      const auto inputs = from_memory<kRanks>(
          world, [&](int rank) { return Tensor(pull.input[rank], call.numel).load_peer(j); });
      // Every rank's output, beginning with this rank's own.
      const auto store = [&](Vector v) {
#pragma unroll
        for (int d = 0; d < kRanks; ++d) {
          if (d < world) Tensor(pull.output[call.rank_at(d, world)], call.numel).store(j, v);
        }
      };
      reduce_into<Stage>(call, world, inputs, SinkBy{store});
    });
  });
}

}  // namespace collx::cuda
