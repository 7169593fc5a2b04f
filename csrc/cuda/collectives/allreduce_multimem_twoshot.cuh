// All-reduce, two-shot, by multicast: every rank loads the sum of all inputs' parts that are its
// own, and stores it to all ranks. Symmetric inputs are read where they are; others are staged
// first. Results go into symmetric outputs; otherwise, and in front of an epilogue, to the place in
// the staging memory where the inputs' part is or would be, and behind a barrier into the output.
//
// Costs the tensor once on each link, in each direction, and a barrier for each step of each chunk.
// Input and output may be the same tensor: an element is read and written by its owner alone.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/multicast.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, typename M, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, 2)
    allreduce_multimem_twoshot_kernel(const __grid_constant__ KernelCall call,
                                      const __grid_constant__ PullArguments pull,
                                      const __grid_constant__ MulticastArguments multicast,
                                      const __grid_constant__ Epilogue... epilogue) {
  using Every = EveryTensor<M, Stage::kDType>;
  Session<MulticastBarrier<M>> session(call, multicast);
  const int world = call.world, rank = call.rank;
  const DenseTensor<Stage::kElementBytes> input(call.input, call.numel);
  const auto output = Stage::template output<false>(call.output, call.numel, epilogue...);
  const Partition parts(input.vectors(), world);
  const bool staged = multicast.input == nullptr, direct = multicast.output != nullptr;
  // Vectors of a part in the staging memory.
  const uint64_t room = pull.result_bytes / kVectorBytes;

  const auto for_parts = [&](const Half& half, auto f) {
#pragma unroll 1
    for (int owner = 0; owner < world; ++owner) {
      const Part part = parts.part(owner);
      for_own(half.count, [&](uint64_t i) {
        if (half.first + i < part.count) f(part.start + half.first + i, owner * room + i);
      });
    }
  };
  const auto stage = [&](const Half& half) {
    Vector* to = pull.staged(call, rank, half.parity);
    for_parts(half,
              [&](uint64_t of_tensor, uint64_t of_half) { to[of_half] = input.load(of_tensor); });
  };
  const auto reduce = [&](const Half& half) {
    const Part part = parts.part(rank);
    const Every region = staging_of_all<M, Stage::kDType>(call, pull, multicast, half.parity);
    const Every from = staged ? region : Every({call, multicast.input, pull.input, 0}, call.numel);
    const Every to = direct ? Every({call, multicast.output, pull.output, 0}, call.numel) : region;
    for_own(half.count, [&](uint64_t i) {
      const uint64_t of_tensor = part.start + half.first + i, of_half = rank * room + i;
      if (half.first + i >= part.count) return;
      reduce_into<Stage>(call, world, SumSource{from, staged ? of_half : of_tensor},
                         EverySink{to, direct ? of_tensor : of_half});
    });
  };
  const auto gather = [&](const Half& half) {
    const Vector* from = pull.staged(call, rank, half.parity);
    for_parts(half, [&](uint64_t of_tensor, uint64_t of_half) {
      const TensorSink sink(output, of_tensor);
      sink.put(ptx::ld_relaxed_sys(from + of_half));
    });
  };
  const uint64_t most = staged || !direct ? room : parts.largest();
  run_barriers(session, !staged, parts.largest(), most, step(stage, Phase::stage_barrier, staged),
               step(reduce, direct ? Phase::none : Phase::gather),
               step(gather, Phase::none, !direct));
}

}  // namespace collx::cuda
