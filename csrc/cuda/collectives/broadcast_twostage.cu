// Broadcast in two stages: the root scatters 1/W of the tensor to each rank, then all gather from
// each other. Symmetric outputs are used where they are; otherwise the parts go through the region,
// two halves in turn.
//
// Costs 2 (W-1)/W of the tensor on the root's link, and two barriers a chunk.
#include "../stages/messages.cuh"
#include "../transports/barrier.cuh"
#include "../transports/session.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

struct Kept {
  Message message;
  uint64_t index;
};

template <int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twostage(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes,
             const __grid_constant__ PullArguments pull) {
  constexpr int kRanks = World<W>::kRanks;
  Session<false> session(call);
  const int world = World<W>::size(call);
  BlockBarrier barrier(call, session.patience);
  const bool symmetric = pull.output[0] != nullptr;
  const Partition parts(call.vectors, world);
  const uint64_t chunk = symmetric ? parts.largest() : pull.result_bytes / kVectorBytes;
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t mine = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const Message& input = routes.sent[0];

  // Vector j of the part that `owner` passes on, where it keeps it.
  const auto kept = [&](int owner, uint64_t half, uint64_t j, uint64_t i) {
    Message m = routes.received[0];
    if (symmetric) {
      m.data = static_cast<char*>(pull.output[owner]);
      return Kept{m, parts.part(owner).start + j};
    }
    m.data = pull.region[owner] + pull.results + half * pull.result_bytes;
    m.bytes = m.width = pull.result_bytes;
    m.whole = true;
    return Kept{m, i};
  };

  bool going = !symmetric || barrier.sync(Phase::start_barrier);
  uint64_t half = 0;
  for (uint64_t done = 0; done < parts.largest() && going; done += chunk, half ^= 1) {
    const uint64_t left = parts.largest() - done, n = left < chunk ? left : chunk;
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner >= world || routes.root != 0) continue;
      const Part part = parts.part(owner);
      for (uint64_t i = mine; i < n && done + i < part.count; i += stride) {
        const Kept to = kept(owner, half, done + i, i);
        store(to.message, to.index, load(input, part.start + done + i));
      }
    }
    going = barrier.sync(Phase::gather);
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner >= world || !going) continue;
      if (symmetric && owner == call.rank) continue;  // it is there
      const Part part = parts.part(owner);
      for (uint64_t i = mine; i < n && done + i < part.count; i += stride) {
        const uint64_t j = part.start + done + i;
        if (routes.root == 0) {
          store(routes.received[0], j, load(input, j));
        } else {
          const Kept from = kept(owner, half, done + i, i);
          store(routes.received[0], j, load_peer(from.message, from.index));
        }
      }
    }
  }
  if (going) barrier.sync(Phase::end_barrier);
  barrier.finish();
  session.finish();
}

}  // namespace

Kernel broadcast_twostage(const Instance& i) {
  return for_world(i.world, [&]<int W>() { return as_kernel(twostage<W>); });
}

}  // namespace collx::cuda
