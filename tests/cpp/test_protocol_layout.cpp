// Tests that the parts of the signal region do not overlap, at any world and payload size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "protocol/cuda_layout.h"
#include "ranges.h"

namespace collx {
namespace {

void add_slots(std::vector<Range>& ranges, const std::string& name, const SlotArea& area,
               int stages, int world) {
  ranges.push_back({name + " entries", area.entries, area.tiles * sizeof(TileEntry)});
  for (int stage = 0; stage < stages; ++stage) {
    for (uint32_t parity = 0; parity < 2; ++parity) {
      for (int source = 0; source < world; ++source) {
        ranges.push_back({name + " slot", area.slot(world, stage, parity, source),
                          static_cast<uint64_t>(area.source_bytes)});
      }
    }
  }
}

/// Returns all parts of a region, with separate slots.
std::vector<Range> ranges_of(const CudaLayout& layout, int world) {
  std::vector<Range> ranges = {
      {"header", 0, sizeof(RegionHeader)},
      {"barrier epochs", layout.barrier_epochs, kMaxBlocks * sizeof(uint32_t)},
      {"barrier flags", layout.barrier_flags, kMaxBlocks * kMaxRanks * sizeof(uint64_t)},
      {"staging", layout.staging, 2 * layout.staging_bytes},
      {"results", layout.results, 2 * layout.result_bytes},
  };
  add_slots(ranges, "oneshot", layout.oneshot, 1, world);
  add_slots(ranges, "twoshot", layout.twoshot, 2, world);
  const ChannelArea& channels = layout.channels;
  const uint64_t counters = channels.slots.tiles * kMaxCudaRanks * sizeof(uint32_t);
  add_slots(ranges, "channels", channels.slots, 1, world);
  ranges.push_back({"channel uses, sent", channels.sent, counters});
  ranges.push_back({"channel uses, received", channels.received, counters});
  ranges.push_back({"channel uses, done", channels.done, counters});
  const LaneArea& lanes = layout.lanes;
  const uint64_t pairs = lanes.lanes * uint64_t{kMaxCudaRanks};
  ranges.push_back({"lane words", lanes.words, pairs * sizeof(LaneWords)});
  ranges.push_back({"lane counts", lanes.counts, pairs * sizeof(LaneCounts)});
  ranges.push_back({"lane marks", lanes.busy, lanes.lanes * sizeof(uint32_t)});
  for (int stage = 0; stage < kLaneStages; ++stage) {
    for (uint32_t lane = 0; lane < lanes.lanes; ++lane) {
      for (int distance = 1; distance < world; ++distance) {
        ranges.push_back({"ring", lanes.ring(world, stage, lane, distance),
                          uint64_t{kRingSlots} * lanes.slot_bytes});
      }
    }
  }
  return ranges;
}

class Layout : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Layout, testing::Range(1, kMaxRanks + 1));

TEST_P(Layout, no_two_parts_share_a_byte_and_all_lie_in_the_region) {
  for (const uint64_t payload : kPayloads) {
    const CudaLayout layout = cuda_layout(GetParam(), payload);
    EXPECT_EQ(find_overlap(ranges_of(layout, GetParam()), layout.total_bytes), "") << payload;
  }
}

// Negative control: the search above finds overlaps.
TEST_P(Layout, a_part_that_reaches_into_another_is_noticed) {
  const CudaLayout good = cuda_layout(GetParam(), 1 << 20);
  CudaLayout bad = good;
  bad.oneshot.entries -= sizeof(TileEntry) * bad.oneshot.tiles + 256;
  EXPECT_NE(find_overlap(ranges_of(bad, GetParam()), bad.total_bytes), "");
  bad = good;
  bad.twoshot.source_bytes += kTileBytes;  // only the slots grow
  EXPECT_NE(find_overlap(ranges_of(bad, GetParam()), bad.total_bytes), "");
  EXPECT_NE(find_overlap(ranges_of(good, GetParam()), good.results), "");
  if (GetParam() == 1) return;  // no peers, no rings
  bad = good;
  bad.lanes.slot_bytes += kVectorBytes;
  EXPECT_NE(find_overlap(ranges_of(bad, GetParam()), bad.total_bytes), "");
}

TEST_P(Layout, stays_within_the_payload_wherever_one_tile_of_each_fits) {
  const uint64_t smallest = cuda_layout(GetParam(), 0).total_bytes;
  for (const uint64_t payload : kPayloads) {
    EXPECT_LE(cuda_layout(GetParam(), payload).total_bytes, std::max(payload, smallest)) << payload;
  }
}

TEST_P(Layout, never_shrinks_when_the_payload_grows) {
  uint64_t before = 0;
  for (uint64_t payload = 0; payload < (256ull << 20); payload += 777777) {
    const CudaLayout layout = cuda_layout(GetParam(), payload);
    EXPECT_GE(layout.total_bytes, before) << payload;
    before = layout.total_bytes;
  }
}

TEST_P(Layout, every_area_carries_at_least_one_tile) {
  for (const uint64_t payload : kPayloads) {
    const CudaLayout layout = cuda_layout(GetParam(), payload);
    for (const SlotArea& area : {layout.oneshot, layout.twoshot, layout.channels.slots}) {
      EXPECT_GE(area.tiles, 1u);
      EXPECT_EQ(area.source_bytes, area.tiles * kTileBytes);
    }
    EXPECT_GE(layout.result_bytes, kTileBytes);
    EXPECT_EQ(layout.result_bytes * static_cast<uint64_t>(GetParam()), layout.staging_bytes);
  }
}

TEST_P(Layout, slots_and_staging_are_aligned_to_whole_lines) {
  for (const uint64_t payload : kPayloads) {
    const CudaLayout layout = cuda_layout(GetParam(), payload);
    for (const Range& range : ranges_of(layout, GetParam())) {
      EXPECT_EQ(range.start % 128, 0u) << range.name;
    }
    EXPECT_EQ(layout.staging_bytes % kVectorBytes, 0u);
    EXPECT_EQ(layout.result_bytes % kVectorBytes, 0u);
  }
}

TEST_P(Layout, there_is_a_lane_and_slots_are_between_their_bounds) {
  for (const uint64_t payload : kPayloads) {
    const LaneArea& lanes = cuda_layout(GetParam(), payload).lanes;
    EXPECT_GE(lanes.lanes, 1u);
    EXPECT_LE(lanes.lanes, kMostLanes);
    EXPECT_GE(lanes.slot_bytes, kLeastLaneSlotBytes);
    EXPECT_LE(lanes.slot_bytes, kMostLaneSlotBytes);
    EXPECT_EQ(lanes.slot_bytes % kLeastLaneSlotBytes, 0u);
  }
}

TEST(Layout, two_ranks_have_all_lanes_with_the_largest_slots) {
  const LaneArea& lanes = cuda_layout(2, kDefaultPayloadBytes).lanes;
  EXPECT_EQ(lanes.lanes, kMostLanes);
  EXPECT_EQ(lanes.slot_bytes, kMostLaneSlotBytes);
}

TEST(Layout, masks_cost_no_use_of_their_own_where_a_use_carries_whole_mebibytes) {
  const auto masked = [](uint64_t bytes) {
    return wire_vectors(true, bytes / kVectorBytes) * kVectorBytes;
  };
  EXPECT_GE(cuda_layout(2, kDefaultPayloadBytes).oneshot.source_bytes, masked(1 << 20));
  EXPECT_GE(cuda_layout(2, kDefaultPayloadBytes).twoshot.source_bytes, masked(8 << 20));
  EXPECT_GE(cuda_layout(4, kDefaultPayloadBytes).twoshot.source_bytes, masked(4 << 20));
  EXPECT_GE(cuda_layout(8, kDefaultPayloadBytes).twoshot.source_bytes, masked(2 << 20));
}

TEST(Layout, both_parities_of_a_slot_differ_and_alternate_across_the_wrap_around) {
  const CudaLayout layout = cuda_layout(2, kDefaultPayloadBytes);
  uint64_t before = 0;
  for (uint32_t epoch = 0xFFFFFFF0u; epoch != 0x10u; ++epoch) {
    const uint64_t slot = layout.oneshot.slot(2, 0, epoch & 1, 1);
    EXPECT_NE(slot, before);
    before = slot;
  }
}

// Words that different ranks write and others poll are on separate lines.
TEST(Layout, header_words_of_different_writers_share_no_line) {
  const size_t poison = offsetof(RegionHeader, poison) / 128;
  const size_t own = offsetof(RegionHeader, claimed) / 128;
  const size_t inbox = offsetof(RegionHeader, inbox) / 128;
  const size_t check = offsetof(RegionHeader, check) / 128;
  EXPECT_LT(poison, own);
  EXPECT_LT(own, inbox);
  EXPECT_LT(inbox, check);
  EXPECT_LT(check, offsetof(RegionHeader, counts) / 128);
  EXPECT_EQ(sizeof(CheckSlot) % 128, 0u);
  EXPECT_EQ(offsetof(RegionHeader, sequence) / 128, own);
}

}  // namespace
}  // namespace collx
