// Broadcast in two stages: the root scatters 1/W of the tensor to each rank, then all ranks gather
// from each other. Symmetric outputs are used directly. Otherwise the parts go through the region,
// in two alternating halves.
//
// Cost: 2 (W-1)/W of the tensor on the root's link, and two barriers for each chunk.
#pragma once

#include "../../protocol/partition.h"
#include "../arguments/vectors.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

struct VectorPlace {
  Message message;
  uint64_t index;
};

template <int W>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    broadcast_twostage_kernel(const __grid_constant__ KernelCall call,
                              const __grid_constant__ Routes routes,
                              const __grid_constant__ PullArguments pull) {
  constexpr int kRanks = World<W>::kRanks;
  Session<BlockBarrier> session(call);
  const int world = World<W>::size(call);
  const bool symmetric = pull.output[0] != nullptr, is_root = routes.root == 0;
  const Partition parts(call.vectors, world);
  const Message &input = routes.from[0], &output = routes.to[0];

  // The location where `owner` keeps vector i of a half of its part.
  const auto place_of = [&](int owner, const Half& half, uint64_t i) {
    Message m = output;
    if (symmetric) {
      m.data = static_cast<char*>(pull.output[owner]);
      return VectorPlace{m, parts.part(owner).start + half.first + i};
    }
    m.data = reinterpret_cast<char*>(pull.passed(call, owner, half.parity));
    m.bytes = pull.result_bytes;
    m.gap = 0;
    m.whole = true;
    return VectorPlace{m, i};
  };
  const auto for_parts = [&](const Half& half, auto f) {
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner >= world) continue;
      const Part part = parts.part(owner);
      for_own(half.count, [&](uint64_t i) {
        if (half.first + i < part.count) f(owner, part.start + half.first + i, i);
      });
    }
  };

  const auto scatter = [&](const Half& half) {
    if (!is_root) return;
    for_parts(half, [&](int owner, uint64_t j, uint64_t i) {
      const VectorPlace to = place_of(owner, half, i);
      store(to.message, to.index, load(input, j));
    });
  };
  const auto gather = [&](const Half& half) {
    for_parts(half, [&](int owner, uint64_t j, uint64_t i) {
      if (symmetric && owner == call.rank) return;  // it is already there
      if (is_root) return store(output, j, load(input, j));
      const VectorPlace from = place_of(owner, half, i);
      store(output, j, Run<>(from.message).load_peer(from.index));
    });
  };
  const uint64_t most = symmetric ? parts.largest() : pull.result_bytes / kVectorBytes;
  run_barriers(session, symmetric, parts.largest(), most, step(scatter, Phase::gather),
               step(gather));
}

}  // namespace collx::cuda
