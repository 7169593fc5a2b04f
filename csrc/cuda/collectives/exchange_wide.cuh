// Every collective except all-reduce, with few blocks: like exchange_lanes.cuh, with blocks that
// serve several lanes.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/wide_chunks.cuh"

namespace collx::cuda {

/// `Bulk`: each message is one run of whole vectors.
template <typename Stage, int W, bool Bulk>
__global__ void __launch_bounds__(kLaneBound, 2)
    exchange_wide_kernel(const __grid_constant__ KernelCall call,
                         const __grid_constant__ LaneArguments lanes,
                         const __grid_constant__ Routes routes) {
  Session<WideLanes<1>> session(call, lanes, routes);
  auto& transport = session.transport;
  using Transport = WideLanes<1>;
  const int world = World<W>::size(call);
  const auto chunk = [&](const LaneChunks& chunks, uint32_t i, const Message& m) {
    return transport.chunk(chunks, i, Run<Bulk>(m).vectors());
  };
  // In a reduction the stage takes the root's own values. Otherwise they are copied. If the same
  // values are sent, they are copied together with the send, since a multiprocessor has little
  // capacity for more loads and stores.
  const bool copies = !Stage::kReduces || (routes.has_root && routes.root != 0);
  const uint32_t all_sent = transport.longest(lanes.sent);
  const uint32_t all_taken = transport.longest(lanes.received);
  const uint32_t all_kept = copies ? transport.number_of(lanes.received[0]) : 0;
  const WideChunks<Transport> move{call, transport, world};
  const auto own_chunk = [&](uint32_t i) { return chunk(lanes.received[1], i, routes.from[0]); };
  const bool keeps_sent = Bulk && routes.same && all_sent > 0 && all_kept > 0;
  const auto clear_all = [&](const RoleThreads& role) {
    for (uint32_t i = 0; i < transport.number_of(lanes.sent[0]); ++i) {
      store_chunk(role, Run<Bulk>(routes.cleared), chunk(lanes.sent[0], i, routes.cleared),
                  [](uint32_t) { return Vector{}; });
    }
  };
  // In a bulk copy, the idle threads of two roles clear.
  constexpr int kClears = 128, kIdle = static_cast<int>(kWarpLanes);

  const auto send = [&](const RoleThreads& role) {
    if constexpr (Bulk) {
      if constexpr (Stage::kReduces) {
        if (role.thread == kIdle) {
          move.load_to_reduce(all_taken, own_chunk, routes.from[0].data);
        }
      }
      if (role.thread != 0) return;
      // A message to all ranks is loaded once.
      const uint32_t each = routes.same ? 1 : world - 1;
      const auto peers_of = [&](uint32_t x, auto f) {
        for (uint32_t d = 1 + x % each; d < static_cast<uint32_t>(world); d += each) {
          if (!f(static_cast<int>(d), x / each)) return false;
        }
        return true;
      };
      const Stages stages = transport.stages(Transport::kScatter);
      stages.pump<true>(
          all_sent * each, [](uint32_t) { return true; },
          [&](uint32_t x, uint32_t to, ptx::TransactionBarrier* barrier) {
            const int d = static_cast<int>(1 + x % each);
            move.load(routes.from[d].data, chunk(lanes.sent[d], x / each, routes.from[d]), to,
                      barrier);
          },
          [](uint32_t) {},
          [&](uint32_t x) {
            return peers_of(x, [&](int d, uint32_t i) {
              return i >= transport.number_of(lanes.sent[d]) || transport.has_room(0, d, i);
            });
          },
          [&](uint32_t x, uint32_t from) {
            peers_of(x, [&](int d, uint32_t i) {
              move.store(transport.slot_at(0, d, i), chunk(lanes.sent[d], i, routes.from[d]).count,
                         from);
              return true;
            });
            if (keeps_sent) {
              const Chunk c = chunk(lanes.received[0], x, routes.to[0]);
              move.store(vectors_at(routes.to[0].data, c.first), c.count, from);
            }
          },
          [&](uint32_t x) { transport.scattered(x / each); });
    } else {
      move.send(role, lanes.sent, all_sent,
                [&](const RoleThreads& of, int d, uint32_t i, auto ready, bool& asked) {
                  return send_chunk(of, Run<>(routes.from[d]),
                                    chunk(lanes.sent[d], i, routes.from[d]),
                                    transport.slot_at(0, d, i), ready, asked);
                });
    }
  };

  const auto take = [&](const RoleThreads& role) {
    const auto may_store = [&](uint32_t i) {
      return !lanes.in_place || i >= all_sent || transport.has_scattered(i);
    };
    if constexpr (Bulk && Stage::kReduces) {
      move.template reduce<Stage, W>(role, all_taken, own_chunk);
    } else if constexpr (Bulk) {
      if (role.thread >= kIdle) return clear_all({role.thread - kIdle, kClears, 0});
      move.take(
          role, Transport::kTake, 0, lanes.received, all_taken,
          [&](int d, uint32_t i, auto f) {
            const Chunk c = chunk(lanes.received[d], i, routes.to[d]);
            f(vectors_at(routes.to[d].data, c.first), c.count);
          },
          may_store, [&](uint32_t i) { transport.taken(i); });
    } else {
      for (uint32_t i = 0; i < all_taken; ++i) {
        const auto ready = [&] {
          return transport.await_peers(role, [&](int d) {
            return i >= transport.number_of(lanes.received[d]) ||
                   (transport.has_come(0, d, i) && may_store(i));
          });
        };
        if constexpr (Stage::kReduces) {
          if (!reduce_chunk<Stage, W, false, false>(
                  call, world, role, Run<>(routes.from[0]), Run<>(routes.to[0]),
                  chunk(lanes.received[1], i, routes.from[0]), ready,
                  [&](int d) { return transport.own_slot(0, d, i); },
                  [](int) -> Vector* { return nullptr; })) {
            return;
          }
        } else {
          if (!ready()) return;
#pragma unroll 1
          for (int d = 1; d < world; ++d) {
            take_chunk(role, Run<>(routes.to[d]), chunk(lanes.received[d], i, routes.to[d]),
                       transport.own_slot(0, d, i));
          }
        }
        ptx::bar_sync(role.barrier, role.threads);
        if (role.thread == 0) transport.taken(i + 1);
      }
    }
  };

  const auto keep = [&](const RoleThreads& role) {
    const Message &own = routes.from[0], &to = routes.to[0];
    if constexpr (Bulk && Stage::kReduces) {
      if (all_taken > 0) {
        if (role.thread != 0) return;
        return move.store_reduced(
            all_taken,
            [&](uint32_t i, uint32_t from) {
              const Chunk c = own_chunk(i);
              move.store(vectors_at(routes.to[0].data, c.first), c.count, from);
            },
            [](uint32_t) { return true; });
      }
    } else if constexpr (Bulk) {
      if (role.thread >= kIdle) return clear_all({role.thread - kIdle + 96, kClears, 0});
      if (role.thread != 0 || keeps_sent) return;
      const Stages stages = transport.stages(Transport::kThird);
      return stages.pump<false>(
          all_kept, [](uint32_t) { return true; },
          [&](uint32_t i, uint32_t stage, ptx::TransactionBarrier* barrier) {
            move.load(own.data, chunk(lanes.received[0], i, to), stage, barrier);
          },
          [](uint32_t) {}, [](uint32_t) { return true; },
          [&](uint32_t i, uint32_t from) {
            const Chunk c = chunk(lanes.received[0], i, to);
            move.store(vectors_at(to.data, c.first), c.count, from);
          },
          [](uint32_t) {});
    }
    clear_all(role);
    for (uint32_t i = 0; i < all_kept; ++i) {
      copy_chunk(role, Run<Bulk>(own), Run<Bulk>(to), chunk(lanes.received[0], i, to));
    }
  };

  transport.run(session.patience, send, take, keep);
}

}  // namespace collx::cuda
