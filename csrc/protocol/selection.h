// Which algorithm a call takes: one pure function of values that all ranks agree on.
//
// A new algorithm is one row in the table. Thresholds are measured; docs/performance.md has the
// figures and says how to repeat them.
#pragma once

#include "call.h"
#include "types.h"

namespace collx {

inline constexpr int kFullBlock = 512;       // threads; smaller blocks use proportionally less room
inline constexpr uint32_t kMostCluster = 8;  // blocks of a portable cluster

/// Clusters of a fused normalization that a device holds at once, by threads of a block and blocks
/// of a cluster, powers of two both. None of two blocks or more where there is no hardware for
/// them. One of each where no device has been asked.
struct Residency {
  static constexpr uint32_t kLeastThreads = 64;
  int32_t held[4][4] = {{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}};

  constexpr uint64_t clusters(uint32_t threads, uint32_t size) const {
    return static_cast<uint64_t>(held[doublings(kLeastThreads, threads)][doublings(1, size)]);
  }

  /// Calls f(threads, size, held) for each.
  template <typename F, typename Self>
  static constexpr void for_each(Self& self, F f) {
    for (uint32_t threads = kLeastThreads; threads <= kFullBlock; threads *= 2) {
      for (uint32_t size = 1; size <= kMostCluster; size *= 2) {
        f(threads, size, self.held[doublings(kLeastThreads, threads)][doublings(1, size)]);
      }
    }
  }

 private:
  static constexpr int doublings(uint32_t from, uint32_t to) {
    int count = 0;
    for (; from < to; from *= 2) ++count;
    return count;
  }
};

/// What the devices of a communicator can do: of every rank's offer the smallest, so that it is the
/// same on all of them.
struct Capabilities {
  bool peer_access = true;  // ranks can read and write each other's memory
  bool dependent_launch =
      true;  // a kernel may be launched before the one that it follows has ended
  Residency residency;
};

struct Request {
  Collective collective = Collective::allreduce;
  DeviceKind device = DeviceKind::cpu;
  DType dtype = DType::float32;
  uint64_t bytes = 0;    // of the full tensor
  uint64_t message = 0;  // bytes of the longest message between two ranks; not of all-reduce
  int world = 1;
  bool input_symmetric = false;
  bool output_symmetric = false;
  Algorithm algorithm = Algorithm::automatic;  // as asked for
  int max_blocks = 0;                          // as asked for; 0: no bound
  int room = 1;  // blocks of kFullBlock threads that the communicator may use at once
  // More of them, for algorithms that push: their grids need not be equal, since epochs belong to
  // tiles, so this one value may differ from rank to rank.
  int spare_room = 0;
  Capabilities capabilities;
};

struct SelectionRow {
  DeviceKind device;
  bool sentinel;   // dtypes with a sentinel, or those without
  bool symmetric;  // needs symmetric input and output
  int max_world;   // for worlds up to this one
  uint64_t up_to;  // bytes
  Algorithm algorithm;
};

inline constexpr uint64_t kAnySize = ~0ull;

// The first row that fits is taken.
inline constexpr SelectionRow kSelection[] = {
    {DeviceKind::cuda, true, false, 2, 1 << 20, Algorithm::oneshot_push},
    {DeviceKind::cuda, true, false, 4, 192 << 10, Algorithm::oneshot_push},
    {DeviceKind::cuda, true, false, 8, 96 << 10, Algorithm::oneshot_push},
    {DeviceKind::cuda, true, false, 8, kAnySize, Algorithm::twoshot_push},
    {DeviceKind::cuda, false, false, 8, 128 << 10, Algorithm::oneshot_push},
    {DeviceKind::cuda, false, true, 8, kAnySize, Algorithm::pull_push},
    {DeviceKind::cuda, false, false, 8, 2 << 20, Algorithm::twoshot_push},
    {DeviceKind::cuda, false, false, 8, kAnySize, Algorithm::twoshot_pull},
    {DeviceKind::cpu, true, true, 2, 2 << 10, Algorithm::oneshot_pull},
    {DeviceKind::cpu, true, true, 2, kAnySize, Algorithm::pull_push},
    {DeviceKind::cpu, true, true, 16, 8 << 10, Algorithm::oneshot_pull},
    {DeviceKind::cpu, true, true, 16, kAnySize, Algorithm::pull_push},
    {DeviceKind::cpu, true, false, 2, 1 << 20, Algorithm::oneshot_pull},
    {DeviceKind::cpu, true, false, 16, 16 << 10, Algorithm::oneshot_pull},
    {DeviceKind::cpu, true, false, 16, kAnySize, Algorithm::twoshot_pull},
    {DeviceKind::cpu, false, true, 2, 2 << 10, Algorithm::oneshot_pull},
    {DeviceKind::cpu, false, true, 2, kAnySize, Algorithm::pull_push},
    {DeviceKind::cpu, false, true, 16, 8 << 10, Algorithm::oneshot_pull},
    {DeviceKind::cpu, false, true, 16, kAnySize, Algorithm::pull_push},
    {DeviceKind::cpu, false, false, 2, 1 << 20, Algorithm::oneshot_pull},
    {DeviceKind::cpu, false, false, 16, 16 << 10, Algorithm::oneshot_pull},
    {DeviceKind::cpu, false, false, 16, kAnySize, Algorithm::twoshot_pull},
};

/// All other collectives.
struct ExchangeRow {
  Collective collective;
  DeviceKind device;
  bool symmetric;  // needs what `direct` needs to be symmetric
  int max_world;
  uint64_t up_to;  // bytes
  Algorithm algorithm;
};

inline constexpr ExchangeRow kExchangeSelection[] = {
    {Collective::broadcast, DeviceKind::cuda, true, 2, kAnySize, Algorithm::onestage},
    {Collective::broadcast, DeviceKind::cuda, false, 2, 32 << 20, Algorithm::onestage},
    {Collective::broadcast, DeviceKind::cuda, false, 8, 256 << 10, Algorithm::onestage},
    {Collective::broadcast, DeviceKind::cuda, false, 8, kAnySize, Algorithm::pipelined},
    {Collective::broadcast, DeviceKind::cpu, false, 16, kAnySize, Algorithm::onestage},
    {Collective::alltoallv, DeviceKind::cuda, false, 8, kAnySize, Algorithm::staged},
    {Collective::alltoallv, DeviceKind::cpu, false, 16, kAnySize, Algorithm::staged},
    // Pulling is slower than pushing: a reduction takes slots at any size.
    {Collective::reducescatter, DeviceKind::cuda, false, 8, kAnySize, Algorithm::staged},
    {Collective::reduce, DeviceKind::cuda, false, 8, kAnySize, Algorithm::staged},
    {Collective::none, DeviceKind::cuda, false, 8, 4 << 20, Algorithm::staged},
    {Collective::none, DeviceKind::cuda, true, 8, kAnySize, Algorithm::direct},
    {Collective::none, DeviceKind::cuda, false, 8, kAnySize, Algorithm::staged},
    {Collective::none, DeviceKind::cpu, true, 16, kAnySize, Algorithm::direct},
    {Collective::none, DeviceKind::cpu, false, 16, kAnySize, Algorithm::staged},
};

/// Whether a staged reduce between GPUs shares the work among the ranks that are not the root.
constexpr bool reduces_in_two_stages(Collective c, int world, uint64_t bytes) {
  return c == Collective::reduce && bytes > (world > 2 ? 512 << 10 : 32 << 20);
}

/// Up to this, slots are faster than the two barriers of a broadcast into symmetric outputs.
inline constexpr uint64_t kStagedBroadcastUpTo = 4 << 20;

constexpr bool needs_symmetric(Algorithm algorithm) {
  return algorithm == Algorithm::pull_push || algorithm == Algorithm::direct;
}

/// Whether the tensors that `direct` needs are symmetric: those that peers touch.
constexpr bool can_be_direct(const Request& r) {
  return is_reduction(r.collective) ? r.input_symmetric : r.output_symmetric;
}

constexpr Algorithm select_exchange(const Request& r) {
  for (const ExchangeRow& row : kExchangeSelection) {
    const bool fits = row.collective == r.collective || row.collective == Collective::none;
    if (fits && row.device == r.device && (!row.symmetric || can_be_direct(r)) &&
        r.world <= row.max_world && r.bytes <= row.up_to) {
      return row.algorithm;
    }
  }
  return Algorithm::fallback;
}

/// The algorithms of a collective, without "auto".
constexpr bool has_algorithm(Collective c, Algorithm a) {
  if (is_norm(c)) {
    if (a == Algorithm::automatic || a == Algorithm::fallback) return true;
    if (scatters_rows(c)) return a == Algorithm::staged;
    return a == Algorithm::oneshot_push || a == Algorithm::twoshot_push ||
           a == Algorithm::oneshot_pull || a == Algorithm::twoshot_pull;
  }
  switch (a) {
    case Algorithm::automatic:
    case Algorithm::fallback:
      return true;
    case Algorithm::staged:
      return c != Collective::allreduce && c != Collective::broadcast;
    case Algorithm::direct:
      return c != Collective::allreduce && c != Collective::broadcast && c != Collective::alltoallv;
    case Algorithm::onestage:
    case Algorithm::twostage:
    case Algorithm::pipelined:
      return c == Collective::broadcast;
    default:
      return c == Collective::allreduce;
  }
}

constexpr Algorithm select_algorithm(const Request& r) {
  if (r.algorithm != Algorithm::automatic) return r.algorithm;
  if (!r.capabilities.peer_access) return Algorithm::fallback;
  if (r.collective != Collective::allreduce) return select_exchange(r);
  const bool symmetric = r.input_symmetric && r.output_symmetric;
  for (const SelectionRow& row : kSelection) {
    if (row.device == r.device && row.sentinel == has_sentinel(r.dtype) &&
        (symmetric || !row.symmetric) && r.world <= row.max_world && r.bytes <= row.up_to) {
      return row.algorithm;
    }
  }
  return Algorithm::fallback;
}

namespace detail {

constexpr int clamp_blocks(uint64_t wanted, uint64_t limit) {
  const uint64_t blocks = wanted < limit ? wanted : limit;
  return blocks < 1 ? 1 : static_cast<int>(blocks);
}

/// Vectors that the grid has to serve: a tensor, a part or a message.
constexpr uint64_t work_of(const Request& r, Algorithm algorithm) {
  const uint64_t world = static_cast<uint64_t>(r.world);
  const uint64_t vectors = ceil_div<uint64_t>(r.bytes, kVectorBytes);
  const uint64_t message = ceil_div<uint64_t>(r.message, kVectorBytes);
  switch (algorithm) {
    case Algorithm::oneshot_push:
    case Algorithm::oneshot_pull:
      return vectors;
    case Algorithm::staged:
    case Algorithm::onestage:
      // With the masks.
      return (message + message / 31) /
                 (reduces_in_two_stages(r.collective, r.world, r.message) ? world - 1 : 1) +
             1;
    case Algorithm::direct:
      return message;
    case Algorithm::pipelined:
      return ceil_div<uint64_t>(message + message / 31 + 1, world > 1 ? world - 1 : 1);
    default:
      return ceil_div<uint64_t>(vectors, world);
  }
}

constexpr bool pushes_into_slots(Algorithm algorithm) {
  return algorithm == Algorithm::oneshot_push || algorithm == Algorithm::twoshot_push ||
         algorithm == Algorithm::staged || algorithm == Algorithm::pipelined;
}

}  // namespace detail

/// Whether a broadcast of one stage between GPUs goes straight into the outputs.
constexpr bool onestage_is_direct(const Request& r) {
  return r.output_symmetric && r.bytes > kStagedBroadcastUpTo;
}

/// Algorithm, grid and block size of a call.
constexpr Plan select(const Request& r) {
  Plan plan{select_algorithm(r), 1, 1};
  if (r.device == DeviceKind::cpu || plan.algorithm == Algorithm::fallback) return plan;

  const uint64_t work = detail::work_of(r, plan.algorithm);
  // Small blocks spread a small call over the device; large ones fill the links.
  const bool push = detail::pushes_into_slots(plan.algorithm) ||
                    (plan.algorithm == Algorithm::onestage && !onestage_is_direct(r));
  plan.threads = kFullBlock;
  if (push) {
    plan.threads = work <= 16384 ? 64 : work <= 32768 ? 128 : work <= 65536 ? 256 : kFullBlock;
  }
  uint64_t room = static_cast<uint64_t>(r.room + (push ? r.spare_room : 0)) *
                  static_cast<uint64_t>(kFullBlock / plan.threads);
  if (r.max_blocks > 0 && static_cast<uint64_t>(r.max_blocks) < room) {
    room = static_cast<uint64_t>(r.max_blocks);
  }
  if (room > static_cast<uint64_t>(kMaxBlocks)) room = kMaxBlocks;
  plan.blocks =
      detail::clamp_blocks(ceil_div<uint64_t>(work, static_cast<uint64_t>(plan.threads)), room);
  return plan;
}

/// Bytes of the region that a call keeps occupied, if it is not to be done in chunks. `bytes`: of
/// the full tensor, in an exchange through slots those of the longest message.
constexpr uint64_t workspace_bytes(Algorithm algorithm, DType dtype, uint64_t bytes, int world,
                                   bool symmetric) {
  const uint64_t w = static_cast<uint64_t>(world);
  const uint64_t tiled = round_up<uint64_t>(bytes, kTileBytes);
  const uint64_t part = round_up<uint64_t>(ceil_div<uint64_t>(bytes, w), kTileBytes);
  const uint64_t wire = has_sentinel(dtype) ? 1 : 2;
  switch (algorithm) {
    case Algorithm::oneshot_push:
      return 2 * w * tiled * wire;
    case Algorithm::twoshot_push:
      return 4 * w * part * wire;
    case Algorithm::oneshot_pull:
      return symmetric ? 0 : 2 * tiled;
    case Algorithm::staged:
    case Algorithm::onestage:
      return 2 * w * round_up<uint64_t>(bytes + bytes / 31, kTileBytes);
    case Algorithm::pipelined:
      return 2 * w *
             round_up<uint64_t>(ceil_div<uint64_t>(bytes + bytes / 31, w > 1 ? w - 1 : 1),
                                kTileBytes);
    case Algorithm::twostage:
      return symmetric ? 0 : 2 * part;
    case Algorithm::twoshot_pull:
      return (symmetric ? 0 : 2 * w * part) + 2 * part;
    default:
      return 0;
  }
}

}  // namespace collx
