// What the fields of RegionLayout mean on CPU, and how large each part is.
//
// MEMORY LAYOUT. A call runs on one thread a rank, so no area is cut into tiles: an area is one
// tile of `tile_bytes`, used once per chunk of a call.
//
//     barrier_epochs  the owner's control block: busy mark, doorbell, epoch of each channel
//     barrier_flags   the published words: where a rank says how far it has come
//     oneshot         slots byte[2][world][tile_bytes]: a peer's chunk
//     twoshot         slots byte[2 stages][2][world][tile_bytes]: its part of a chunk, the result
//     staging         byte[2][staging_bytes]: a chunk of the owner's input, for peers to pull: one
//                     for all of them, or slots by receiver
//     results         byte[2][result_bytes]: the owner's part of that chunk, reduced or passed on
//     channels        sent, received: uint64_t[2][kMaxRanks], what the owner sends to and expects
//                     from each rank, in a call whose ranks do not know it of each other
//
// `entries`, the areas of pairs and the slots of channels are unused: epochs stand in the control
// block.
#pragma once

#include "exchange.h"
#include "layout.h"

namespace collx {

inline constexpr uint32_t kCpuControlBytes = 256;
inline constexpr uint32_t kCpuFlagBytes = 512;
inline constexpr uint32_t kCpuCountBytes = 2 * kMaxRanks * sizeof(uint64_t);
inline constexpr uint64_t kCpuLineBytes = 64;

/// Chunks stay in a core's second-level cache, where a peer finds them. Ranks that outnumber the
/// cores change places at every chunk, which larger chunks make rarer.
inline constexpr uint64_t kCpuOneshotBytes = 128 << 10;
constexpr uint64_t cpu_twoshot_bytes(int world) { return world <= 2 ? 256 << 10 : 512 << 10; }

namespace detail {

struct CpuSizes {
  uint64_t oneshot;  // bytes of a slot
  uint64_t part;     // bytes of a rank's part of a two-shot chunk
};

constexpr SlotArea take_cpu_slots(Cursor& cursor, uint64_t tile_bytes, uint64_t slots) {
  SlotArea area{};
  area.tiles = 1;
  area.tile_bytes = static_cast<uint32_t>(tile_bytes);
  area.source_bytes = area.tile_bytes;
  area.slots = cursor.take(slots * tile_bytes);
  return area;
}

constexpr RegionLayout place_cpu(int world, const CpuSizes& sizes) {
  const uint64_t w = static_cast<uint64_t>(world);
  RegionLayout layout{};
  Cursor cursor{round_up<uint64_t>(sizeof(RegionHeader), 256)};
  layout.barrier_epochs = cursor.take(kCpuControlBytes);
  layout.barrier_flags = cursor.take(kCpuFlagBytes);
  layout.oneshot = take_cpu_slots(cursor, sizes.oneshot, 2 * w);
  layout.twoshot = take_cpu_slots(cursor, sizes.part, 4 * w);
  layout.staging_bytes = w * sizes.part;
  layout.result_bytes = sizes.part;
  layout.staging = cursor.take(2 * layout.staging_bytes);
  layout.results = cursor.take(2 * layout.result_bytes);
  layout.channels.sent = cursor.take(kCpuCountBytes);
  layout.channels.received = cursor.take(kCpuCountBytes);
  layout.total_bytes = cursor.at;
  return layout;
}

constexpr CpuSizes shrink_cpu(const CpuSizes& full, uint64_t halvings) {
  const auto shrunk = [&](uint64_t bytes) {
    const uint64_t lines = (bytes >> halvings) / kCpuLineBytes;
    return (lines < 1 ? 1 : lines) * kCpuLineBytes;
  };
  return {shrunk(full.oneshot), shrunk(full.part)};
}

}  // namespace detail

/// The smallest region that works: every slot one line.
constexpr uint64_t smallest_cpu_region(int world) {
  return detail::place_cpu(world, {kCpuLineBytes, kCpuLineBytes}).total_bytes;
}

/// The largest layout within `payload_bytes`, in halvings of the sizes above. When even the
/// smallest does not fit, total_bytes of the answer exceeds payload_bytes.
constexpr RegionLayout cpu_layout(int world, uint64_t payload_bytes) {
  const uint64_t part = round_up<uint64_t>(
      ceil_div<uint64_t>(cpu_twoshot_bytes(world), static_cast<uint64_t>(world)), kCpuLineBytes);
  const detail::CpuSizes full{kCpuOneshotBytes, part};
  RegionLayout layout = detail::place_cpu(world, full);
  for (uint64_t halvings = 1; halvings <= 16 && layout.total_bytes > payload_bytes; ++halvings) {
    layout = detail::place_cpu(world, detail::shrink_cpu(full, halvings));
  }
  return layout;
}

/// How a use divides a rank's staging among the messages that it carries.
struct CpuSlots {
  uint64_t chunk;   // bytes of a message in one use
  uint64_t stride;  // from slot to slot; 0 where all receivers read the same one
  bool own;         // the sender has a slot as well

  constexpr uint64_t offset(int sender, int receiver) const {
    const int slot = !own && receiver > sender ? receiver - 1 : receiver;
    return static_cast<uint64_t>(slot) * stride;
  }
};

/// `longest` message between two ranks, or kAnyMessage where ranks do not agree on one.
inline constexpr uint64_t kAnyMessage = ~0ull;
constexpr CpuSlots cpu_slots(const RegionLayout& layout, Collective collective, uint64_t longest,
                             int world) {
  const auto whole_lines = [](uint64_t bytes) { return bytes / kCpuLineBytes * kCpuLineBytes; };
  const bool same = sends_the_same(collective);
  // A reduction may need room for what the rank itself adds.
  const bool own = !same && (is_reduction(collective) || world == 1);
  const uint64_t slots = same ? 1 : static_cast<uint64_t>(own ? world : world - 1);
  uint64_t chunk = whole_lines(layout.staging_bytes / slots);
  // Some ranks fill the next chunk while others read this one: the more chunks, the less of the
  // work follows one after the other.
  const uint64_t half = whole_lines(layout.staging_bytes / 2);
  if (is_one_way(collective) && chunk > half && half > 0) chunk = half;
  if (same) return {chunk, 0, false};
  // Slots of short messages stand close together.
  return {chunk, longest < chunk ? round_up<uint64_t>(longest, kCpuLineBytes) : chunk, own};
}

/// Bytes of the full tensor that one use of the region carries, or 0 where nothing is staged: the
/// pull forms that read symmetric inputs use it for their results alone.
constexpr uint64_t cpu_chunk_bytes(const RegionLayout& layout, Algorithm algorithm, int world) {
  switch (algorithm) {
    case Algorithm::oneshot_push:
      return layout.oneshot.tile_bytes;
    case Algorithm::twoshot_push:
      return layout.twoshot.tile_bytes * static_cast<uint64_t>(world);
    case Algorithm::oneshot_pull:
    case Algorithm::twoshot_pull:
      return layout.staging_bytes;
    default:
      return 0;
  }
}

}  // namespace collx
