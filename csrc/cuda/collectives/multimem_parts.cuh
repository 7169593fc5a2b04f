// The common part of the two-shot all-reduces that send their results by multicast: every rank
// reduces its part and stores it to all ranks at once. Results go into symmetric outputs.
// Otherwise, and before an epilogue, they go into the staging memory, to the place where the
// inputs' part is or would be staged, and after a barrier into the output.
//
// Input and output may be the same tensor: only the owner of an element reads and writes it.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/multicast.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

/// The location of one vector of this rank's part: in the tensor, and in a half of the staging
/// memory.
struct PartPlace {
  uint64_t of_tensor;
  uint64_t of_half;
};

/// `staged`: inputs are staged first. `source_of(half, place)`: the source of the ranks' vectors.
template <typename Stage, typename M, typename Output, typename SourceOf>
__device__ __forceinline__ void run_parts(Session<MulticastBarrier<M>>& session,
                                          const PullArguments& pull,
                                          const MulticastArguments& multicast, bool staged,
                                          const Output& output, SourceOf source_of) {
  using Every = EveryTensor<M, Stage::kDType>;
  const KernelCall& call = session.call;
  const int world = call.world, rank = call.rank;
  const DenseTensor<Stage::kElementBytes> input(call.input, call.numel);
  const Partition parts(input.vectors(), world);
  const bool direct = multicast.output != nullptr;
  // The number of vectors of a part in the staging memory.
  const uint64_t room = pull.result_bytes / kVectorBytes;

  const auto for_parts = [&](const Half& half, auto f) {
#pragma unroll 1
    for (int owner = 0; owner < world; ++owner) {
      const Part part = parts.part(owner);
      for_own(half.count, [&](uint64_t i) {
        if (half.first + i < part.count) {
          f(PartPlace{part.start + half.first + i, owner * room + i});
        }
      });
    }
  };
  const auto stage = [&](const Half& half) {
    Vector* to = pull.staged(call, rank, half.parity);
    for_parts(half, [&](const PartPlace& at) { to[at.of_half] = input.load(at.of_tensor); });
  };
  const auto reduce = [&](const Half& half) {
    const Part part = parts.part(rank);
    const Every to = direct ? Every({call, multicast.output, pull.output, 0}, call.numel)
                            : staging_of_all<M, Stage::kDType>(call, pull, multicast, half.parity);
    for_own(half.count, [&](uint64_t i) {
      if (half.first + i >= part.count) return;
      const PartPlace at{part.start + half.first + i, rank * room + i};
      const uint64_t place = direct ? at.of_tensor : at.of_half;
      const auto store = [=](Vector v) { to.store(place, v); };
      reduce_into<Stage>(call, world, source_of(half, at), SinkBy{store});
    });
  };
  const auto gather = [&](const Half& half) {
    const Vector* from = pull.staged(call, rank, half.parity);
    for_parts(half, [&](const PartPlace& at) {
      const TensorSink sink(output, at.of_tensor);
      sink.put(ptx::ld_relaxed_sys(from + at.of_half));
    });
  };
  const uint64_t most = staged || !direct ? room : parts.largest();
  run_barriers(session, !staged, parts.largest(), most, step(stage, Phase::stage_barrier, staged),
               step(reduce, direct ? Phase::none : Phase::gather),
               step(gather, Phase::none, !direct));
}

}  // namespace collx::cuda
