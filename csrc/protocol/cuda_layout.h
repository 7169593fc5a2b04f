// Where the areas of a GPU's region lie:
//
//   [ header | barrier epochs and flags | tile entries | slots | staging ]
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
inline constexpr int kFullBlock = 512;   // threads; smaller blocks use proportionally less room
inline constexpr int kMaxBlocks = 1024;  // blocks of a call that uses barriers

/// Slots for pushed data: for each stage, parity and sending rank, `tiles` tiles of `tile_bytes`.
/// A use of tile t at epoch e takes parity e & 1.
struct SlotArea {
  uint64_t entries;  // offset of TileEntry[tiles]
  uint64_t slots;    // offset of byte[stages][2][world][tiles][tile_bytes]
  uint32_t tiles;
  uint32_t tile_bytes;    // on the wire: kTileBytes by sentinel, twice that as {data, epoch} pairs
  uint32_t source_bytes;  // tiles * tile_bytes: from one rank, in one use of all tiles

  COLLX_HD constexpr uint64_t slot(int world, int stage, uint32_t parity, int source) const {
    const uint64_t index =
        (static_cast<uint64_t>(stage) * 2 + parity) * static_cast<uint64_t>(world) +
        static_cast<uint64_t>(source);
    return slots + index * source_bytes;
  }
  /// Bytes of data that one use of all tiles carries from one rank to another.
  COLLX_HD constexpr uint64_t capacity() const { return static_cast<uint64_t>(tiles) * kTileBytes; }
};

/// Slots for messages between pairs of which some exchange nothing. Every ordered pair of ranks
/// has a channel in each tile: its slots, and the uses that it has seen, counted by both ends. The
/// sender writes a slot again when the receiver is done with the use two before.
struct ChannelArea {
  SlotArea slots;     // one stage, sentinel; entries hold busy marks alone
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
  SlotArea oneshot;         // one stage, sentinel
  SlotArea oneshot_pairs;   // one stage, {data, epoch}
  SlotArea twoshot;         // two stages, sentinel
  SlotArea twoshot_pairs;   // two stages, {data, epoch}
  ChannelArea channels;
  uint64_t staging;  // byte[2][staging_bytes]: inputs that peers pull
  uint64_t staging_bytes;
  uint64_t results;  // byte[2][result_bytes]: reduced parts that peers pull
  uint64_t result_bytes;
};

namespace detail {

constexpr SlotArea take_slots(Cursor& cursor, uint64_t budget, uint32_t tile_bytes, int stages,
                              int world) {
  const uint64_t per_tile =
      static_cast<uint64_t>(stages) * 2 * static_cast<uint64_t>(world) * tile_bytes;
  const uint64_t fitting = budget / per_tile;
  SlotArea area{};
  area.tiles = static_cast<uint32_t>(fitting < 1 ? 1 : fitting);
  area.tile_bytes = tile_bytes;
  area.source_bytes = area.tiles * tile_bytes;
  area.entries = cursor.take(area.tiles * sizeof(TileEntry));
  area.slots = cursor.take(per_tile * area.tiles);
  return area;
}

constexpr ChannelArea take_channels(Cursor& cursor, uint64_t budget, int world) {
  constexpr uint64_t kRow = kMaxCudaRanks * sizeof(uint32_t);
  const uint64_t slots = 2 * static_cast<uint64_t>(world) * kTileBytes;
  const uint64_t tiles = budget / (slots + sizeof(TileEntry) + 3 * kRow);
  ChannelArea area{};
  area.slots = take_slots(cursor, tiles * slots, kTileBytes, 1, world);
  area.sent = cursor.take(area.slots.tiles * kRow);
  area.received = cursor.take(area.slots.tiles * kRow);
  area.done = cursor.take(area.slots.tiles * kRow);
  return area;
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
  layout.oneshot = detail::take_slots(cursor, share(8, 2 * w * (1024 << 10)), kTileBytes, 1, world);
  layout.oneshot_pairs =
      detail::take_slots(cursor, share(4, 4 * w * (256 << 10)), 2 * kTileBytes, 1, world);
  layout.twoshot = detail::take_slots(cursor, share(67, 64 << 20), kTileBytes, 2, world);
  layout.twoshot_pairs = detail::take_slots(cursor, share(4, 8 << 20), 2 * kTileBytes, 2, world);
  layout.channels = detail::take_channels(cursor, share(11, 16 << 20), world);
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
