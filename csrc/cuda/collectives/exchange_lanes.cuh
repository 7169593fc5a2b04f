// Every collective except all-reduce, by chunks in lanes: each rank sends its messages to the
// peers' slots, and copies or reduces the chunks that arrive in its own slots.
//
// Cost: the messages on each link. If only one rank of a pair sends, the other one only announces
// the chunks that it has consumed.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/chunks.cuh"

namespace collx::cuda {

/// `Simple`: a sum or a copy of messages that each consist of one run of whole vectors.
template <typename Stage, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kLaneBound, 2)
    exchange_lanes_kernel(const __grid_constant__ KernelCall call,
                          const __grid_constant__ LaneArguments lanes,
                          const __grid_constant__ Routes routes,
                          const __grid_constant__ Epilogue... epilogue) {
  Session<Lanes<W, 1>> session(call, lanes, routes);
  const auto& transport = session.transport;
  const int world = World<W>::size(call);

  const auto send = [&](const RoleThreads& role, uint32_t i, auto ready, auto slot) {
    return send_chunks<Simple>(role, transport, world, routes.from, lanes.sent, i, ready, slot);
  };

  const auto take = [&](const RoleThreads& role, uint32_t i, auto ready, auto from, auto) {
    if constexpr (Stage::kReduces) {
      const Run<Simple> input(routes.from[0]);
      const auto output = Stage::template output<Simple>(routes.to[0], epilogue...);
      return reduce_chunk<Stage, W, Simple, false>(
          call, world, role, input, output,
          chunk_of<Simple>(transport, lanes.received[1], i, routes.from[0]), ready, from,
          [](int) -> Vector* { return nullptr; });
    } else {
      if (!ready()) return false;
      take_chunks<Simple>(role, transport, world, routes.to, lanes.received, i, from);
      return true;
    }
  };

  // In a reduction the stage takes the root's own values. Otherwise they are copied.
  const auto keep = [&](const RoleThreads& role) {
    const bool copies = !Stage::kReduces || (routes.has_root && routes.root != 0);
    const Run<Simple> own(routes.from[0]), to(routes.to[0]), cleared(routes.cleared);
    if (copies) copy_chunks(role, transport, lanes.received[0], own, to);
    clear_chunks(role, transport, lanes.sent[0], cleared);
  };

  session.transport.run(session.patience, send, take, keep);
}

}  // namespace collx::cuda
