// Broadcast between more than two ranks, by chunks in lanes: the root sends a different slice,
// 1/(W-1) of the tensor, to each other rank, which passes the slice on to the ranks that are not
// the root.
//
// Cost: the tensor once on the root's link, and two waits for a chunk.
#pragma once

#include "../transports/chunks.cuh"

namespace collx::cuda {

/// A destination of chunks: a message on this rank, and slots of other ranks. `slot(d)`: the slot
/// of the rank at distance d, for a chunk that begins at vector `first`.
template <typename Output, typename Slot>
struct PassedOn {
  using Ahead = typename Output::Ahead;
  const Output& output;
  Slot slot;
  int world;
  int except;  // distance of a rank that gets nothing
  uint64_t first;

  __device__ __forceinline__ Ahead ahead(uint64_t i) const { return output.ahead(i); }
  __device__ __forceinline__ void store(uint64_t i, const Vector& v, Ahead ahead) const {
#pragma unroll 1
    for (int d = 1; d < world; ++d) {
      if (d != except) ptx::st_relaxed_sys(slot(d) + (i - first), v);
    }
    output.store(i, v, ahead);
  }
};

/// `Simple`: the messages each consist of one run of whole vectors.
template <bool Simple>
__global__ void __launch_bounds__(kLaneBound, 2)
    broadcast_lanes_kernel(const __grid_constant__ KernelCall call,
                           const __grid_constant__ LaneArguments lanes,
                           const __grid_constant__ Routes routes) {
  Session<Lanes<0, 2>> session(call, lanes, routes);
  const auto& transport = session.transport;

  const auto scatter = [&](const RoleThreads& role, uint32_t i, auto ready, auto slot) {
    return send_chunks<Simple>(role, transport, call.world, routes.from, lanes.sent, i, ready,
                               slot);
  };

  const auto pass_on = [&](const RoleThreads& role, uint32_t i, auto ready, auto from, auto slot) {
    if (!ready()) return false;
    const Message& to = routes.to[routes.root];
    const Run<Simple> output(to);
    const Chunk slice = chunk_of<Simple>(transport, lanes.received[routes.root], i, to);
    take_chunk(role, PassedOn{output, slot, call.world, routes.root, slice.first}, slice,
               from(routes.root));
    return true;
  };

  const auto gather = [&](const RoleThreads& role, uint32_t i, auto ready, auto slot) {
    if (!ready()) return false;
    take_chunks<Simple>(role, transport, call.world, routes.to, lanes.gathered, i, slot);
    return true;
  };

  const auto keep = [&](const RoleThreads& role) {
    copy_chunks(role, transport, lanes.received[0], Run<Simple>(routes.from[0]),
                Run<Simple>(routes.to[0]));
  };

  session.transport.run(session.patience, scatter, pass_on, gather, keep);
}

}  // namespace collx::cuda
