// All-reduce, two-shot, by pulling: every rank reduces its part of all inputs into its region.
// After a barrier, every rank gathers the parts from the regions. Symmetric inputs are read
// directly. Other inputs are staged first.
//
// Cost: 2 (W-1)/W of the tensor on each link, and a barrier for each step of each chunk.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, int W, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    allreduce_twoshot_pull_kernel(const __grid_constant__ KernelCall call,
                                  const __grid_constant__ PullArguments pull,
                                  const __grid_constant__ Epilogue... epilogue) {
  using Tensor = DenseTensor<Stage::kElementBytes>;
  constexpr int kRanks = World<W>::kRanks;
  Session<BlockBarrier> session(call);
  const int world = World<W>::size(call), rank = call.rank;
  const Tensor input(call.input, call.numel);
  const auto output = Stage::template output<false>(call.output, call.numel, epilogue...);
  const Partition parts(input.vectors(), world);
  const bool staged = pull.input[0] == nullptr;
  const uint64_t most = pull.result_bytes / kVectorBytes;
  // The start of the part of `owner` in the inputs that rank `of` has staged.
  const auto staging = [&](int of, int owner, const Half& half) {
    return pull.staged(call, of, half.parity) + static_cast<uint64_t>(owner) * most;
  };

  // Computed where it is used: the parts of eight ranks would take registers that the vectors need.
  const auto part_of = [&](int owner) {
    return parts.part(static_cast<int>(ptx::keep(static_cast<uint32_t>(owner))));
  };

  const auto stage = [&](const Half& half) {
    for_own(half.count, [&](uint64_t i) {
#pragma unroll
      for (int owner = 0; owner < kRanks; ++owner) {
        if (owner >= world || owner == rank) continue;
        const Part part = part_of(owner);
        const uint64_t j = half.first + i;
        if (j < part.count) staging(rank, owner, half)[i] = input.load(part.start + j);
      }
    });
  };
  const auto reduce = [&](const Half& half) {
    const Part part = parts.part(rank);
    for_own(half.count, [&](uint64_t i) {
      const uint64_t j = half.first + i;
      if (j >= part.count) return;
      const auto inputs = from_memory<kRanks>(world, [&](int peer) {
        if (peer == rank) return input.load(part.start + j);
        return staged ? ptx::ld_relaxed_sys(staging(peer, rank, half) + i)
                      : Tensor(pull.input[peer], call.numel).load_peer(part.start + j);
      });
      Vector* passed = pull.passed(call, rank, half.parity) + i;
      reduce_into<Stage>(
          call, world, inputs,
          Both{SinkBy{[=](Vector v) { *passed = v; }}, TensorSink{output, part.start + j}});
    });
  };
  const auto gather = [&](const Half& half) {
    for_own(half.count, [&](uint64_t i) {
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        if (d >= world) continue;
        const int owner = call.rank_at(d, world);
        const Part part = part_of(owner);
        const uint64_t j = half.first + i;
        if (j >= part.count) continue;
        const TensorSink sink(output, part.start + j);
        sink.put(ptx::ld_relaxed_sys(pull.passed(call, owner, half.parity) + i));
      }
    });
  };
  run_barriers(session, !staged, parts.largest(), most, step(stage, Phase::stage_barrier, staged),
               step(reduce, Phase::gather), step(gather));
}

}  // namespace collx::cuda
