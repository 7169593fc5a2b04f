// The loops of the kernels: the order in which a thread takes the steps for its vectors. Each
// kernel defines its steps. The loops over rows of a normalization are in pieces.cuh, and those of
// messages between pairs of ranks in collectives/one_way.cuh.
#pragma once

#include "../../protocol/uses.h"
#include "barrier.cuh"
#include "sinks.cuh"
#include "sources.cuh"
#include "tiles.cuh"

namespace collx::cuda {

/// The location of a vector in the slots.
struct Place {
  uint64_t vector;  // index in the call, on the wire
  uint32_t i;       // index in the use
  uint32_t epoch;   // of its tile, in this use
};

/// The order in which a thread takes the steps of its vectors within a use. In a simple call a
/// thread has one vector and takes all steps in turn.
enum class Order {
  phases,  // one step for all vectors, then the next step
  behind,  // the second step runs one vector behind the first, so its wait overlaps with sends
};

/// Processes vectors through the slots of tiles, use by use: calls step(place) for each vector of
/// this thread. `local(slice)` does the work that stays within this rank. It runs after the sends
/// of a use, so that the copy overlaps with the transfer of the last words.
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

/// The work of a rank between two barriers, with one half of the staging memory.
struct Half {
  uint64_t first;   // index of the first item
  uint64_t count;   // number of items
  uint32_t parity;  // which half; it is written again two barriers later, after all have read it
};

template <typename Work>
struct BarrierStep {
  Work work;    // called by all threads with a Half
  Phase after;  // a barrier, if any
  bool applies;
};
template <typename Work>
__device__ __forceinline__ BarrierStep<Work> step(Work work, Phase after = Phase::none,
                                                  bool applies = true) {
  return {work, after, applies};
}

/// Processes the steps with barriers, for `most` of `total` items at a time. The barrier at the end
/// guarantees that no peer still accesses this rank's tensors. `opens`: a barrier comes first,
/// after which the tensors of peers may be accessed. Threads that have failed skip the remaining
/// work. `kAll`: they still take the steps, because other blocks may wait for them; these steps
/// check for failure themselves.
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

/// Runs `work` between two barriers of all ranks.
template <typename Flags, typename Work>
__device__ __forceinline__ void run_between_barriers(Session<BarrierBy<Flags>>& session,
                                                     Work work) {
  run_barriers(session, true, 1, 1, step([&](const Half&) { work(); }));
}

}  // namespace collx::cuda
