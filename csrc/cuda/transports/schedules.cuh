// The loops of the kernels: which step a thread takes with which vector. Each kernel says what its
// steps are. Rows of a normalization, which lie in pieces, have theirs in pieces.cuh; collectives
// between pairs of which some exchange nothing in collectives/one_way.cuh.
#pragma once

#include "../../protocol/uses.h"
#include "barrier.cuh"
#include "sinks.cuh"
#include "sources.cuh"
#include "tiles.cuh"

namespace collx::cuda {

/// Of a vector in slots.
struct Place {
  uint64_t vector;  // which one of the call, on the wire
  uint32_t i;       // which one of the use
  uint32_t epoch;   // of its tile, in this use
};

/// In which order a thread takes the steps of its vectors, within a use. In a simple call it has
/// one vector, and takes all steps in turn.
enum class Order {
  phases,  // a step with all of them, then the next step
  behind,  // the second step one vector behind the first: what it waits for travels meanwhile
};

/// Through the slots of tiles, use by use: step(place) for each vector of this thread's.
/// `local(slice)`, what is left to do within this rank, stands behind what a use sends: copying
/// takes the time that its last words travel.
template <Order kOrder, bool Simple, typename Local, typename... Steps>
__device__ __forceinline__ void run_slots(Session<Tiles<Simple>>& session, Local local,
                                          Steps... steps) {
  const KernelCall& call = session.call;
  Tiles<Simple>& tiles = session.transport;
  if constexpr (Simple) {
    tiles.for_own(static_cast<uint32_t>(call.vectors), [&](uint32_t i) {
      const Place at{i, i, tiles.epoch(i)};
      (steps(at), ...);
    });
    local(Slice{});
  } else {
    for (Uses uses(call.vectors, call.capacity); uses.any(); uses.next()) {
      if (uses.number() > 0) next_use();
      const auto n = static_cast<uint32_t>(uses.count());
      const Slice slice{uses.number(), uses.all()};
      const auto placed = [&](auto& step) {
        return [&](uint32_t i) {
          step(Place{uses.first() + i, i, tiles.epoch(i) + uses.number()});
        };
      };
      if constexpr (kOrder == Order::behind) {
        tiles.for_own_behind(
            n, [&] { local(slice); }, placed(steps)...);
      } else {
        (tiles.for_own(n, placed(steps)), ...);
        local(slice);
      }
      tiles.count(uses.number() + 1, n);
    }
  }
}

/// What a rank does between two barriers, with a half of the staging memory.
struct Half {
  uint64_t first;   // of what the call goes through
  uint64_t count;   // of these
  uint32_t parity;  // which half; one is written again two barriers later, when all have read it
};

template <typename Work>
struct BarrierStep {
  Work work;    // by all threads, with a Half
  Phase after;  // a barrier, if any
  bool applies;
};
template <typename Work>
__device__ __forceinline__ BarrierStep<Work> step(Work work, Phase after = Phase::none,
                                                  bool applies = true) {
  return {work, after, applies};
}

/// Through barriers: all steps for `most` of `total` at a time, with a barrier at the end, which
/// says that nobody uses this rank's tensors any more. `opens`: a barrier first, after which peers'
/// tensors may be used. Threads that have failed leave out what follows; `kAll`: steps of which
/// other blocks may wait for this one, and which look for themselves, are taken all the same.
template <bool kAll = false, typename Flags, typename... Steps>
__device__ __forceinline__ void run_barriers(Session<BarrierBy<Flags>>& session, bool opens,
                                             uint64_t total, uint64_t most, Steps... steps) {
  const auto sync = [&](Phase phase) { return session.transport.sync(session.patience, phase); };
  bool going = !opens || sync(Phase::start_barrier) || kAll;
  for (Uses uses(total, most); uses.any() && going; uses.next()) {
    const Half half{uses.first(), uses.count(), uses.number() & 1};
    const auto take = [&](const auto& s) {
      if (!s.applies || !going) return;
      s.work(half);
      if (s.after != Phase::none) going = sync(s.after) || kAll;
    };
    (take(steps), ...);
  }
  if (going) sync(Phase::end_barrier);
}

/// Between a barrier of all ranks and another one.
template <typename Flags, typename Work>
__device__ __forceinline__ void run_between_barriers(Session<BarrierBy<Flags>>& session,
                                                     Work work) {
  run_barriers(session, true, 1, 1, step([&](const Half&) { work(); }));
}

}  // namespace collx::cuda
