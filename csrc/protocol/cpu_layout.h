// The layout of a CPU rank's region.
//
// A call runs on one thread per rank, so areas are not divided into tiles. Each area is used once
// per chunk of a call and exists twice; uses alternate between the two copies. Offsets are equal on
// all ranks: they depend only on world size and payload bytes.
#pragma once

#include "algorithms.h"
#include "geometry.h"
#include "region_header.h"

namespace collx {

inline constexpr uint32_t kCpuControlBytes = 256;
inline constexpr uint32_t kCpuFlagBytes = 512;
inline constexpr uint32_t kCpuCountBytes = 2 * kMaxRanks * sizeof(uint64_t);
inline constexpr uint64_t kCpuLineBytes = 64;

/// Chunks stay in a core's second-level cache, from which peers read them. If there are more ranks
/// than cores, each chunk costs a context switch; larger chunks make these rarer.
inline constexpr uint64_t kCpuOneshotBytes = 128 << 10;
constexpr uint64_t cpu_twoshot_bytes(int world) { return world <= 2 ? 256 << 10 : 512 << 10; }

/// byte[stages][2][world][slot_bytes]: the data that each rank has stored here, by parity of the
/// use.
struct CpuSlotArea {
  uint64_t slots;  // offset
  uint64_t slot_bytes;

  constexpr uint64_t slot(int world, int stage, uint32_t parity, int source) const {
    const uint64_t index =
        (static_cast<uint64_t>(stage) * 2 + parity) * static_cast<uint64_t>(world) +
        static_cast<uint64_t>(source);
    return slots + index * slot_bytes;
  }
};

struct CpuLayout {
  uint64_t total_bytes;
  uint64_t control;     // the owner's control block: busy mark, doorbell, epoch of each channel
  uint64_t published;   // the words by which the owner publishes its progress
  CpuSlotArea oneshot;  // one stage: a peer's chunk
  CpuSlotArea twoshot;  // two stages: a part of a chunk, and the result
  uint64_t staging;  // byte[2][staging_bytes]: a chunk of the owner's input that peers pull; either
                     // one chunk for all peers, or slots by receiver
  uint64_t staging_bytes;
  uint64_t results;  // byte[2][result_bytes]: the owner's part of that chunk, reduced or passed on
  uint64_t result_bytes;
  // uint64_t[2][kMaxRanks]: bytes that the owner sends to and expects from each rank, for calls in
  // which each rank knows only its own counts.
  uint64_t sends;
  uint64_t expects;
};

namespace detail {

struct CpuSizes {
  uint64_t oneshot;  // bytes of a slot
  uint64_t part;     // bytes of a rank's part of a two-shot chunk
};

constexpr CpuLayout place_cpu(int world, const CpuSizes& sizes) {
  const uint64_t w = static_cast<uint64_t>(world);
  CpuLayout layout{};
  Cursor cursor{round_up<uint64_t>(sizeof(RegionHeader), 256)};
  layout.control = cursor.take(kCpuControlBytes);
  layout.published = cursor.take(kCpuFlagBytes);
  layout.oneshot = {cursor.take(2 * w * sizes.oneshot), sizes.oneshot};
  layout.twoshot = {cursor.take(4 * w * sizes.part), sizes.part};
  layout.staging_bytes = w * sizes.part;
  layout.result_bytes = sizes.part;
  layout.staging = cursor.take(2 * layout.staging_bytes);
  layout.results = cursor.take(2 * layout.result_bytes);
  layout.sends = cursor.take(kCpuCountBytes);
  layout.expects = cursor.take(kCpuCountBytes);
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

/// The smallest valid region: every slot is one cache line.
constexpr uint64_t smallest_cpu_region(int world) {
  return detail::place_cpu(world, {kCpuLineBytes, kCpuLineBytes}).total_bytes;
}

/// The largest layout within `payload_bytes`, found by halving the sizes above. If even the
/// smallest does not fit, total_bytes of the result exceeds payload_bytes.
constexpr CpuLayout cpu_layout(int world, uint64_t payload_bytes) {
  const uint64_t part = round_up<uint64_t>(
      ceil_div<uint64_t>(cpu_twoshot_bytes(world), static_cast<uint64_t>(world)), kCpuLineBytes);
  const detail::CpuSizes full{kCpuOneshotBytes, part};
  CpuLayout layout = detail::place_cpu(world, full);
  for (uint64_t halvings = 1; halvings <= 16 && layout.total_bytes > payload_bytes; ++halvings) {
    layout = detail::place_cpu(world, detail::shrink_cpu(full, halvings));
  }
  return layout;
}

/// How a use divides a rank's staging among the messages that it carries.
struct CpuSlots {
  uint64_t chunk;   // bytes of a message in one use
  uint64_t stride;  // bytes from slot to slot; 0 if all receivers read the same slot
  bool own;         // the sender has a slot for itself as well

  constexpr uint64_t offset(int sender, int receiver) const {
    const int slot = !own && receiver > sender ? receiver - 1 : receiver;
    return static_cast<uint64_t>(slot) * stride;
  }
};

/// `longest`: bytes of the longest message between two ranks, or kAnyMessage if ranks do not agree
/// on it.
inline constexpr uint64_t kAnyMessage = ~0ull;
constexpr CpuSlots cpu_slots(const CpuLayout& layout, Collective collective, uint64_t longest,
                             int world) {
  const auto whole_lines = [](uint64_t bytes) { return bytes / kCpuLineBytes * kCpuLineBytes; };
  const bool same = sends_the_same(collective);
  // A reduction may need room for the rank's own contribution.
  const bool own = !same && (is_reduction(collective) || world == 1);
  const uint64_t slots = same ? 1 : static_cast<uint64_t>(own ? world : world - 1);
  uint64_t chunk = whole_lines(layout.staging_bytes / slots);
  // Some ranks fill the next chunk while others read this one, so more chunks overlap more work.
  const uint64_t half = whole_lines(layout.staging_bytes / 2);
  if (is_one_way(collective) && chunk > half && half > 0) chunk = half;
  if (same) return {chunk, 0, false};
  // Slots of short messages are packed together.
  return {chunk, longest < chunk ? round_up<uint64_t>(longest, kCpuLineBytes) : chunk, own};
}

/// Bytes of the full tensor that one use of the region carries. 0 if a use carries messages, whose
/// size cpu_slots() computes. Pull algorithms with symmetric inputs use it for their results only.
constexpr uint64_t cpu_chunk_bytes(const CpuLayout& layout, Algorithm algorithm, int world) {
  const AlgorithmRow& row = row_of(algorithm);
  if (row.staging) return layout.staging_bytes;
  if (row.slots == SlotsFor::none) return 0;
  if (row.share == Share::tensor) return layout.oneshot.slot_bytes;
  return row.share == Share::part ? layout.twoshot.slot_bytes * static_cast<uint64_t>(world) : 0;
}

}  // namespace collx
