// All-reduce with few blocks: like allreduce_lanes.cuh, with blocks that serve several lanes.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/wide_chunks.cuh"
#include "allreduce_lanes.cuh"

namespace collx::cuda {

/// `Bulk`: the tensors consist of whole vectors.
template <typename Stage, int W, bool Bulk>
__global__ void __launch_bounds__(kLaneBound, 2)
    allreduce_wide_kernel(const __grid_constant__ KernelCall call,
                          const __grid_constant__ LaneArguments lanes) {
  Session<WideLanes<2>> session(call, lanes);
  auto& transport = session.transport;
  using Transport = WideLanes<2>;
  const int world = World<W>::size(call);
  const DenseTensor<Stage::kElementBytes, Bulk> input(call.input, call.numel);
  const DenseTensor<Stage::kElementBytes, Bulk> output(call.output, call.numel);
  const Partition parts(input.vectors(), world);
  const uint32_t n = transport.number_of(lanes.sent[1]);
  const Part own = parts.part(call.rank);
  const auto chunk = [&](const Part& part, uint32_t i) {
    return transport.chunk(lanes.sent[1], i, part.count);
  };
  const auto own_chunk = [&](uint32_t i) { return chunk(own, i); };
  const char* const own_input = static_cast<const char*>(call.input) + own.start * kVectorBytes;
  const auto part_of = [&](int d) { return parts.part(call.rank_at(d, world)); };
  const WideChunks<Transport> move{call, transport, world};

  const auto scatter = [&](const RoleThreads& role) {
    if constexpr (Bulk) {
      if (role.thread == kWarpLanes) move.load_to_reduce(n, own_chunk, own_input);
      if (role.thread != 0) return;
      const uint32_t each = world - 1;
      const Stages stages = transport.stages(Transport::kScatter);
      stages.pump<true>(
          n * each, [](uint32_t) { return true; },
          [&](uint32_t x, uint32_t to, ptx::TransactionBarrier* barrier) {
            const Part part = part_of(static_cast<int>(1 + x % each));
            move.load(vectors_at(const_cast<void*>(call.input), part.start), chunk(part, x / each),
                      to, barrier);
          },
          [](uint32_t) {},
          [&](uint32_t x) {
            return transport.has_room(0, static_cast<int>(1 + x % each), x / each);
          },
          [&](uint32_t x, uint32_t from) {
            const int d = static_cast<int>(1 + x % each);
            move.store(transport.slot_at(0, d, x / each), chunk(part_of(d), x / each).count, from);
          },
          [&](uint32_t x) { transport.scattered(x / each); });
    } else {
      move.send(role, lanes.sent, n,
                [&](const RoleThreads& of, int d, uint32_t i, auto ready, bool& asked) {
                  const Part part = part_of(d);
                  return send_chunk(of, PartOf{input, part.start}, chunk(part, i),
                                    transport.slot_at(0, d, i), ready, asked);
                });
    }
  };

  const auto result_at = [&](int d, uint32_t i, const Chunk& c) {
    return transport.direct() ? vectors_at(lanes.output[d], own.start + c.first)
                              : transport.slot_at(1, d, i);
  };
  const auto reduce = [&](const RoleThreads& role) {
    if constexpr (Bulk) {
      move.template reduce<Stage, W>(role, n, own_chunk);
    } else {
      for (uint32_t i = 0; i < n; ++i) {
        const Chunk c = chunk(own, i);
        const auto ready = [&] {
          return transport.await_peers(role, [&](int d) {
            return transport.has_come(0, d, i) &&
                   (transport.direct() || transport.has_room(1, d, i));
          });
        };
        if (!reduce_chunk<Stage, W, false, true>(
                call, world, role, PartOf{input, own.start}, PartOf{output, own.start}, c, ready,
                [&](int d) { return transport.own_slot(0, d, i); },
                [&](int d) { return result_at(d, i, c); })) {
          return;
        }
        ptx::bar_sync(role.barrier, role.threads);
        if (role.thread != 0) continue;
        transport.taken(i + 1);
        transport.reduced(i + 1);
      }
    }
  };

  const auto gather = [&](const RoleThreads& role) {
    if constexpr (Bulk) {
      if (role.thread == kWarpLanes) {
        move.store_reduced(
            n,
            [&](uint32_t i, uint32_t from) {
              const Chunk c = own_chunk(i);
              for (int d = 1; d < world; ++d) move.store(result_at(d, i, c), c.count, from);
              move.store(vectors_at(call.output, own.start + c.first), c.count, from);
            },
            [&](uint32_t i) {
              for (int d = 1; d < world; ++d) {
                if (!transport.direct() && !transport.has_room(1, d, i)) return false;
              }
              return true;
            });
        return;
      }
    }
    if (transport.direct()) return;
    if constexpr (Bulk) {
      move.take(
          role, Transport::kThird, 1, lanes.sent, n,
          [&](int d, uint32_t i, auto f) {
            const Part part = part_of(d);
            const Chunk c = chunk(part, i);
            f(vectors_at(call.output, part.start + c.first), c.count);
          },
          [](uint32_t) { return true; }, [&](uint32_t i) { transport.gathered(i); });
    } else {
      for (uint32_t i = 0; i < n; ++i) {
        if (!transport.await_peers(role, [&](int d) { return transport.has_come(1, d, i); })) {
          return;
        }
#pragma unroll 1
        for (int d = 1; d < world; ++d) {
          const Part part = part_of(d);
          take_chunk(role, PartOf{output, part.start}, chunk(part, i), transport.own_slot(1, d, i));
        }
        ptx::bar_sync(role.barrier, role.threads);
        if (role.thread == 0) transport.gathered(i + 1);
      }
    }
  };

  transport.run(session.patience, scatter, reduce, gather);
}

}  // namespace collx::cuda
