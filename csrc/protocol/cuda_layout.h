// The layout of a GPU's region:
//
//   [ header | barrier epochs and flags | tile entries and counts | lane tables | slots | rings |
//     staging ]
//
// Offsets are equal on all ranks: they only depend on world size and payload bytes, never on
// the shape of a call. Remote ranks write the flags, the lanes' words, the slots and the rings;
// only the owner accesses tile entries, barrier epochs and the lanes' counts.
#pragma once

#include "epoch.h"
#include "region_header.h"
#include "types.h"

namespace collx {

inline constexpr uint32_t kTileBytes = 1024;  // of data: 64 vectors
inline constexpr uint32_t kVectorBytes = 16;  // widest access of a thread
inline constexpr uint32_t kTileVectors = kTileBytes / kVectorBytes;
inline constexpr uint32_t kWarpLanes = 32;
inline constexpr int kFullBlock = 512;   // threads; smaller blocks use proportionally less room
inline constexpr int kMaxBlocks = 1024;  // blocks of a call that uses barriers

/// Vectors that `vectors` of data take on the wire. With masks, one vector in 32 holds the masks.
COLLX_HD constexpr uint64_t wire_vectors(bool masked, uint64_t vectors) {
  return masked ? ceil_div<uint64_t>(vectors, 31) * 32 : vectors;
}

/// Slots for pushed data: `tiles` tiles for each stage, parity and sending rank. A use of a tile at
/// epoch e has parity e & 1.
struct SlotArea {
  uint64_t entries;  // offset of TileEntry[tiles]
  uint64_t slots;    // offset of byte[stages][2][world][tiles][kTileBytes]
  uint32_t tiles;
  uint32_t source_bytes;  // bytes of all tiles from one rank in one use

  COLLX_HD constexpr uint64_t slot(int world, int stage, uint32_t parity, int source) const {
    const uint64_t index =
        (static_cast<uint64_t>(stage) * 2 + parity) * static_cast<uint64_t>(world) +
        static_cast<uint64_t>(source);
    return slots + index * source_bytes;
  }
};

/// Slots for collectives in which some pairs of ranks exchange no messages. Every ordered pair of
/// ranks has a channel in each tile: its slots, and a count of its uses at both ends. The sender
/// overwrites a slot only after the receiver has finished the use two before.
struct ChannelArea {
  SlotArea slots;     // one stage; entries only hold busy marks
  uint64_t sent;      // uint32_t[tiles][kMaxCudaRanks]: uses by receiver; owned by the sender
  uint64_t received;  // the same type: uses by sender; owned by the receiver
  uint64_t done;      // the same type: the last finished use by receiver; the receiver writes it
};

// Threads of a block that serves a lane. With fewer threads than kFullBlock, each has enough
// registers to move more data at a time.
inline constexpr int kLaneBlock = 320;
// The block size for which the lane kernels are compiled. At 80 registers per thread, a
// multiprocessor can hold a block of kFullBlock threads beside such a block: each of its four
// partitions has 16384 registers, of which three warps of this block and four warps of the other
// take 15872.
inline constexpr int kLaneBound = 384;
inline constexpr uint32_t kMostLanes = 132;  // one for each multiprocessor of an H100
inline constexpr uint32_t kRingSlots = 4;    // of a ring; a power of two, since counts wrap around
inline constexpr int kLaneStages = 2;        // scattered data, and results
// In a call with at most this many blocks, each block serves several lanes and copies through
// shared memory.
inline constexpr int kFewBlocks = 16;
inline constexpr int kWidest = 16;  // most lanes of a block; a power of two
inline constexpr uint32_t kMostWideChunkBytes = 16 << 10;
inline constexpr uint32_t kMostLaneSlotBytes = 32 << 10;
inline constexpr uint32_t kLeastLaneSlotBytes = 1 << 10;

/// A lane's state as another rank reports it. Only that rank stores these words, to each peer.
struct alignas(128) LaneWords {
  /// For each stage {sent : high 32, consumed : low 32}: chunks that the other rank has sent into
  /// its ring here, and chunks that it has consumed from this rank's ring there.
  struct alignas(32) Ring {
    uint64_t word;
  } ring[kLaneStages];
  alignas(32) uint32_t direct;  // calls whose results the other rank has stored in full
  /// Fingerprints of the calls whose first chunk of the first stage is in these slots.
  uint32_t fingerprint[kRingSlots];
};

/// This rank's counts of a lane that it shares with another rank. They persist between calls.
struct alignas(32) LaneCounts {
  uint32_t sent[kLaneStages];
  uint32_t consumed[kLaneStages];
  uint32_t direct;  // calls with results that are stored into outputs
};

/// Bytes of the words, counts and busy mark of a lane.
inline constexpr uint64_t kLaneTableBytes =
    kMaxCudaRanks * (sizeof(LaneWords) + sizeof(LaneCounts)) + sizeof(uint32_t);

/// A lane has a ring of kRingSlots slots for each stage and each ordered pair of ranks. A call uses
/// the first lanes, and the first bytes of each slot.
struct LaneArea {
  uint64_t words;   // offset of LaneWords[lanes][kMaxCudaRanks], by the rank that stores them
  uint64_t counts;  // offset of LaneCounts[lanes][kMaxCudaRanks], by the other rank
  uint64_t busy;    // offset of uint32_t[lanes]: marks of calls in progress
  uint64_t rings;   // offset of byte[kLaneStages][lanes][world - 1][kRingSlots][slot_bytes]
  uint32_t lanes;
  uint32_t slot_bytes;

  /// Offset of the ring through which the rank `distance` places before the region's owner sends to
  /// it.
  COLLX_HD constexpr uint64_t ring(int world, int stage, uint32_t lane, int distance) const {
    const uint64_t index =
        (static_cast<uint64_t>(stage) * lanes + lane) * static_cast<uint64_t>(world - 1) +
        static_cast<uint64_t>(distance - 1);
    return rings + index * kRingSlots * slot_bytes;
  }
};

// On GPUs, barriers are at fixed offsets after the header, so that kernels have them as constants.
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
  LaneArea lanes;
  uint64_t staging;  // byte[2][staging_bytes]: inputs that peers pull
  uint64_t staging_bytes;
  uint64_t results;  // byte[2][result_bytes]: reduced parts that peers pull
  uint64_t result_bytes;
};

namespace detail {

/// As many tiles as fit into the budget.
constexpr SlotArea size_slots(uint64_t budget, int stages, int world, uint64_t more = 0) {
  const uint64_t slots = static_cast<uint64_t>(stages) * 2 * static_cast<uint64_t>(world);
  const uint64_t fitting = budget / (slots * kTileBytes + more);
  SlotArea area{};
  area.tiles = static_cast<uint32_t>(fitting < 1 ? 1 : fitting);
  area.source_bytes = area.tiles * kTileBytes;
  return area;
}

constexpr uint64_t slot_bytes(const SlotArea& area, int stages, int world) {
  return static_cast<uint64_t>(stages) * 2 * static_cast<uint64_t>(world) * area.source_bytes;
}

constexpr void take_slots(Cursor& cursor, SlotArea& area, int stages, int world) {
  area.slots = cursor.take(slot_bytes(area, stages, world));
}

/// Slots of a lane in all its rings at one rank.
constexpr uint64_t slots_of_lane(int world) {
  return kLaneStages * kRingSlots * static_cast<uint64_t>(world - 1);
}
constexpr uint64_t least_lane_bytes(int world) {
  return slots_of_lane(world) * kLeastLaneSlotBytes + kLaneTableBytes;
}

/// As many lanes as fit into the budget, then slots as large as fit.
constexpr LaneArea size_lanes(uint64_t budget, int world) {
  const uint64_t slots = slots_of_lane(world);
  const uint64_t lanes = at_most(budget / least_lane_bytes(world), kMostLanes);
  LaneArea area{};
  area.lanes = static_cast<uint32_t>(lanes < 1 ? 1 : lanes);
  const uint64_t each =
      budget / area.lanes > kLaneTableBytes ? budget / area.lanes - kLaneTableBytes : 0;
  const uint64_t bytes = slots == 0 ? 0 : each / slots / kLeastLaneSlotBytes * kLeastLaneSlotBytes;
  area.slot_bytes = static_cast<uint32_t>(
      at_most(bytes < kLeastLaneSlotBytes ? kLeastLaneSlotBytes : bytes, kMostLaneSlotBytes));
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
  const uint64_t one_lane = detail::least_lane_bytes(world);
  const uint64_t fixed = cursor.at + one_lane + (128 << 10);  // tile entries and rounding
  const uint64_t budget = payload_bytes > fixed ? payload_bytes - fixed : 0;
  const auto share = [&](uint64_t percent, uint64_t cap) {
    return detail::at_most(budget / 100 * percent, cap);
  };
  // With masks, the caps are 1 MiB for each pair of ranks, and 4 MiB between four ranks in two
  // stages.
  constexpr uint64_t kCounts = kMaxCudaRanks * sizeof(uint32_t);
  layout.oneshot = detail::size_slots(share(7, 2 * w * (1058 << 10)), 1, world);
  layout.twoshot = detail::size_slots(share(53, 16 * (4230 << 10)), 2, world);
  ChannelArea& channels = layout.channels;
  constexpr uint64_t kTables = sizeof(TileEntry) + 3 * kCounts;
  channels.slots = detail::size_slots(share(11, 16 << 20), 1, world, kTables);
  // Inputs take W/(W+1) of the share and results the rest.
  const uint64_t staged = share(5, 6 << 20) / 2 * w / (w + 1);
  layout.staging_bytes =
      staged < w * kTileBytes ? w * kTileBytes : staged / (w * kTileBytes) * (w * kTileBytes);
  layout.result_bytes = layout.staging_bytes / w;
  // Lanes take what is left.
  const uint64_t taken =
      detail::slot_bytes(layout.oneshot, 1, world) + detail::slot_bytes(layout.twoshot, 2, world) +
      detail::slot_bytes(channels.slots, 1, world) + channels.slots.tiles * kTables +
      2 * (layout.staging_bytes + layout.result_bytes);
  const uint64_t left = budget > taken ? budget - taken : 0;
  LaneArea& lanes = layout.lanes;
  lanes = detail::size_lanes(detail::at_most(one_lane + left, 34 << 20), world);
  // Tables that every call reads are adjacent and next to the header, so that a small call touches
  // few pages.
  SlotArea* const areas[] = {&layout.oneshot, &layout.twoshot, &channels.slots};
  for (SlotArea* area : areas) {
    area->entries = cursor.take(area->tiles * sizeof(TileEntry));
  }
  uint64_t* const tables[] = {&channels.sent, &channels.received, &channels.done};
  for (uint64_t* counts : tables) {
    *counts = cursor.take(channels.slots.tiles * kCounts);
  }
  lanes.words = cursor.take(lanes.lanes * kMaxCudaRanks * sizeof(LaneWords));
  lanes.counts = cursor.take(lanes.lanes * kMaxCudaRanks * sizeof(LaneCounts));
  lanes.busy = cursor.take(lanes.lanes * sizeof(uint32_t));
  detail::take_slots(cursor, layout.oneshot, 1, world);
  detail::take_slots(cursor, layout.twoshot, 2, world);
  detail::take_slots(cursor, channels.slots, 1, world);
  lanes.rings = cursor.take(kLaneStages * lanes.lanes * (w - 1) * kRingSlots * lanes.slot_bytes);
  layout.staging = cursor.take(2 * layout.staging_bytes);
  layout.results = cursor.take(2 * layout.result_bytes);
  layout.total_bytes = cursor.at;
  return layout;
}

}  // namespace collx
