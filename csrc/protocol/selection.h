// Which algorithm a call takes: one pure function of values that all ranks agree on.
//
// A new algorithm is one row in the table. Thresholds are measured; docs/performance.md has the
// figures and says how to repeat them.
#pragma once

#include "call.h"
#include "types.h"

namespace collx {

struct Capabilities {
  bool peer_access = true;  // ranks can read and write each other's memory
};

struct Request {
  Collective collective = Collective::allreduce;
  DeviceKind device = DeviceKind::cpu;
  DType dtype = DType::float32;
  uint64_t bytes = 0;  // of the full tensor
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

inline constexpr int kFullBlock = 512;  // threads; smaller blocks use proportionally less room

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

constexpr bool needs_symmetric(Algorithm algorithm) { return algorithm == Algorithm::pull_push; }

constexpr Algorithm select_algorithm(const Request& r) {
  if (r.algorithm != Algorithm::automatic) return r.algorithm;
  if (!r.capabilities.peer_access) return Algorithm::fallback;
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

}  // namespace detail

/// Algorithm, grid and block size of a call.
constexpr Plan select(const Request& r) {
  Plan plan{select_algorithm(r), 1, 1};
  if (r.device == DeviceKind::cpu || plan.algorithm == Algorithm::fallback) return plan;

  const uint64_t vectors = ceil_div<uint64_t>(r.bytes, kVectorBytes);
  // Vectors that the grid has to serve: whole tensor, or the part of one rank.
  const bool whole =
      plan.algorithm == Algorithm::oneshot_push || plan.algorithm == Algorithm::oneshot_pull;
  const uint64_t work =
      whole ? vectors : ceil_div<uint64_t>(vectors, static_cast<uint64_t>(r.world));
  // Small blocks spread a small call over the device; large ones fill the links.
  const bool push =
      plan.algorithm == Algorithm::oneshot_push || plan.algorithm == Algorithm::twoshot_push;
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

/// Bytes of the region that a call keeps occupied, if it is not to be done in chunks.
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
    case Algorithm::twoshot_pull:
      return (symmetric ? 0 : 2 * w * part) + 2 * part;
    default:
      return 0;
  }
}

}  // namespace collx
