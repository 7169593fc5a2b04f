// Where the areas of a GPU's region lie:
//
//   [ header | barrier epochs and flags | tile entries and counts | slots | staging ]
//
// Offsets are equal on all ranks: they follow from world size and payload bytes alone, never from
// the shape of a call. Remote ranks write the flags and the slots; tile entries and barrier epochs
// are their owner's alone.
#pragma once

#include "epoch.h"
#include "region.h"
#include "types.h"

namespace collx {

inline constexpr uint32_t kTileBytes = 1024;  // of data: 64 vectors
inline constexpr uint32_t kVectorBytes = 16;  // widest access of a thread
inline constexpr uint32_t kTileVectors = kTileBytes / kVectorBytes;
inline constexpr uint32_t kWarpLanes = 32;
inline constexpr int kFullBlock = 512;   // threads; smaller blocks use proportionally less room
inline constexpr int kMaxBlocks = 1024;  // blocks of a call that uses barriers

/// Vectors that data of `vectors` takes on the wire: with masks, of 32 one is theirs.
COLLX_HD constexpr uint64_t wire_vectors(bool masked, uint64_t vectors) {
  return masked ? ceil_div<uint64_t>(vectors, 31) * 32 : vectors;
}

/// Slots for pushed data: for each stage, parity and sending rank, `tiles` tiles.
/// A use of tile t at epoch e takes parity e & 1.
struct SlotArea {
  uint64_t entries;  // offset of TileEntry[tiles]
  uint64_t slots;    // offset of byte[stages][2][world][tiles][kTileBytes]
  uint32_t tiles;
  uint32_t source_bytes;  // of all tiles: from one rank, in one use of them

  COLLX_HD constexpr uint64_t slot(int world, int stage, uint32_t parity, int source) const {
    const uint64_t index =
        (static_cast<uint64_t>(stage) * 2 + parity) * static_cast<uint64_t>(world) +
        static_cast<uint64_t>(source);
    return slots + index * source_bytes;
  }
};

/// Slots for messages between pairs of which some exchange nothing. Every ordered pair of ranks
/// has a channel in each tile: its slots, and the uses that it has seen, counted by both ends. The
/// sender writes a slot again when the receiver is done with the use two before.
struct ChannelArea {
  SlotArea slots;     // one stage; entries hold busy marks alone
  uint64_t sent;      // uint32_t[tiles][kMaxCudaRanks]: uses, by receiver; the sender's own
  uint64_t received;  // likewise: uses, by sender; the receiver's own
  uint64_t done;      // likewise: the last use that is over, by receiver, who writes it
};

// On GPUs the barriers stand at fixed places behind the header, which kernels know.
inline constexpr uint64_t kBarrierEpochs = round_up<uint64_t>(sizeof(RegionHeader), 256);
inline constexpr uint64_t kBarrierFlags = kBarrierEpochs + kMaxBlocks * sizeof(uint32_t);
inline constexpr uint64_t kBarrierEnd = kBarrierFlags + kMaxBlocks * kMaxRanks * sizeof(uint64_t);

struct CudaLayout {
  uint64_t total_bytes;
  uint64_t barrier_epochs;  // uint32_t[kMaxBlocks]
  uint64_t barrier_flags;   // uint64_t[kMaxBlocks][kMaxRanks]: {epoch, fingerprint}
  SlotArea oneshot;         // one stage
  SlotArea twoshot;         // two stages
  ChannelArea channels;
  uint64_t staging;  // byte[2][staging_bytes]: inputs that peers pull
  uint64_t staging_bytes;
  uint64_t results;  // byte[2][result_bytes]: reduced parts that peers pull
  uint64_t result_bytes;
};

namespace detail {

/// As many tiles as the budget has room for.
constexpr SlotArea size_slots(uint64_t budget, int stages, int world, uint64_t more = 0) {
  const uint64_t slots = static_cast<uint64_t>(stages) * 2 * static_cast<uint64_t>(world);
  const uint64_t fitting = budget / (slots * kTileBytes + more);
  SlotArea area{};
  area.tiles = static_cast<uint32_t>(fitting < 1 ? 1 : fitting);
  area.source_bytes = area.tiles * kTileBytes;
  return area;
}

constexpr void take_slots(Cursor& cursor, SlotArea& area, int stages, int world) {
  area.slots = cursor.take(static_cast<uint64_t>(stages) * 2 * static_cast<uint64_t>(world) *
                           area.source_bytes);
}

}  // namespace detail

/// The layout for GPUs. `payload_bytes` bounds the whole region; each area is capped where more
/// would not be faster, and shrinks in proportion down to one tile.
constexpr CudaLayout cuda_layout(int world, uint64_t payload_bytes) {
  const uint64_t w = static_cast<uint64_t>(world);
  CudaLayout layout{};
  detail::Cursor cursor{kBarrierEnd};
  layout.barrier_epochs = kBarrierEpochs;
  layout.barrier_flags = kBarrierFlags;
  const uint64_t fixed = cursor.at + (128 << 10);  // tile entries and rounding
  const uint64_t budget = payload_bytes > fixed ? payload_bytes - fixed : 0;
  const auto share = [&](uint64_t percent, uint64_t cap) {
    return detail::at_most(budget / 100 * percent, cap);
  };
  // Caps of 1 MiB from each rank to each, and of 4 MiB between four ranks in two stages, with
  // masks.
  constexpr uint64_t kCounts = kMaxCudaRanks * sizeof(uint32_t);
  layout.oneshot = detail::size_slots(share(9, 2 * w * (1058 << 10)), 1, world);
  layout.twoshot = detail::size_slots(share(71, 16 * (4230 << 10)), 2, world);
  ChannelArea& channels = layout.channels;
  channels.slots =
      detail::size_slots(share(14, 16 << 20), 1, world, sizeof(TileEntry) + 3 * kCounts);
  // What a call looks up stands side by side, next to the header: a small one touches few pages.
  SlotArea* const areas[] = {&layout.oneshot, &layout.twoshot, &channels.slots};
  for (SlotArea* area : areas) {
    area->entries = cursor.take(area->tiles * sizeof(TileEntry));
  }
  uint64_t* const tables[] = {&channels.sent, &channels.received, &channels.done};
  for (uint64_t* counts : tables) {
    *counts = cursor.take(channels.slots.tiles * kCounts);
  }
  detail::take_slots(cursor, layout.oneshot, 1, world);
  detail::take_slots(cursor, layout.twoshot, 2, world);
  detail::take_slots(cursor, channels.slots, 1, world);
  // Inputs take W/(W+1) of the share and results the rest.
  const uint64_t staged = share(6, 6 << 20) / 2 * w / (w + 1);
  layout.staging_bytes =
      staged < w * kTileBytes ? w * kTileBytes : staged / (w * kTileBytes) * (w * kTileBytes);
  layout.result_bytes = layout.staging_bytes / w;
  layout.staging = cursor.take(2 * layout.staging_bytes);
  layout.results = cursor.take(2 * layout.result_bytes);
  layout.total_bytes = cursor.at;
  return layout;
}

}  // namespace collx
