// Tests that the parts of a CPU rank's signal region do not overlap, at any world and payload size.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "protocol/cpu_layout.h"
#include "ranges.h"

namespace collx {
namespace {

void add_slots(std::vector<Range>& ranges, const std::string& name, const CpuSlotArea& area,
               int stages, int world) {
  for (int stage = 0; stage < stages; ++stage) {
    for (uint32_t parity = 0; parity < 2; ++parity) {
      for (int source = 0; source < world; ++source) {
        ranges.push_back({name, area.slot(world, stage, parity, source), area.slot_bytes});
      }
    }
  }
}

std::vector<Range> ranges_of(const CpuLayout& layout, int world) {
  std::vector<Range> ranges = {
      {"header", 0, sizeof(RegionHeader)},
      {"control block", layout.control, kCpuControlBytes},
      {"published words", layout.published, kCpuFlagBytes},
      {"staging", layout.staging, 2 * layout.staging_bytes},
      {"results", layout.results, 2 * layout.result_bytes},
      {"counts sent", layout.sends, kCpuCountBytes},
      {"counts expected", layout.expects, kCpuCountBytes},
  };
  add_slots(ranges, "oneshot", layout.oneshot, 1, world);
  add_slots(ranges, "twoshot", layout.twoshot, 2, world);
  return ranges;
}

class CpuRegion : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CpuRegion, testing::Range(1, kMaxCpuRanks + 1));

TEST_P(CpuRegion, no_two_parts_share_a_byte_and_all_lie_in_the_region) {
  for (const uint64_t payload : kPayloads) {
    const CpuLayout layout = cpu_layout(GetParam(), payload);
    EXPECT_EQ(find_overlap(ranges_of(layout, GetParam()), layout.total_bytes), "") << payload;
  }
}

// Negative control.
TEST_P(CpuRegion, a_slot_that_grows_into_another_part_is_noticed) {
  CpuLayout layout = cpu_layout(GetParam(), kDefaultPayloadBytes);
  layout.twoshot.slot_bytes += 256;
  EXPECT_NE(find_overlap(ranges_of(layout, GetParam()), layout.total_bytes), "");
}

TEST_P(CpuRegion, stays_within_the_payload_down_to_the_smallest_region) {
  const uint64_t smallest = smallest_cpu_region(GetParam());
  EXPECT_EQ(cpu_layout(GetParam(), 0).total_bytes, smallest);
  EXPECT_EQ(cpu_layout(GetParam(), smallest).total_bytes, smallest);
  for (uint64_t payload = smallest; payload < (4 << 20); payload += 4099) {
    EXPECT_LE(cpu_layout(GetParam(), payload).total_bytes, payload);
  }
}

TEST_P(CpuRegion, fits_the_default_payload_unshrunk) {
  const CpuLayout layout = cpu_layout(GetParam(), kDefaultPayloadBytes);
  EXPECT_EQ(layout.total_bytes, cpu_layout(GetParam(), 1ull << 40).total_bytes);
  EXPECT_LE(layout.total_bytes, kDefaultPayloadBytes);
}

TEST_P(CpuRegion, slots_are_whole_lines_on_lines_of_their_own) {
  for (const uint64_t payload : kPayloads) {
    const CpuLayout layout = cpu_layout(GetParam(), payload);
    for (const Range& range : ranges_of(layout, GetParam())) {
      EXPECT_EQ(range.start % kCpuLineBytes, 0u) << range.name;
      EXPECT_GT(range.bytes, 0u) << range.name;
    }
    EXPECT_EQ(layout.oneshot.slot_bytes % kCpuLineBytes, 0u);
    EXPECT_EQ(layout.twoshot.slot_bytes % kCpuLineBytes, 0u);
  }
}

TEST_P(CpuRegion, a_chunk_is_what_its_area_holds) {
  for (const uint64_t payload : kPayloads) {
    const CpuLayout layout = cpu_layout(GetParam(), payload);
    const uint64_t world = static_cast<uint64_t>(GetParam());
    const auto chunk = [&](Algorithm a) { return cpu_chunk_bytes(layout, a, GetParam()); };
    EXPECT_EQ(chunk(Algorithm::oneshot_push), layout.oneshot.slot_bytes);
    EXPECT_EQ(chunk(Algorithm::twoshot_push), layout.twoshot.slot_bytes * world);
    EXPECT_EQ(chunk(Algorithm::twoshot_pull), layout.result_bytes * world);
    EXPECT_EQ(chunk(Algorithm::fallback), 0u);
  }
}

constexpr Collective kExchanges[] = {
    Collective::reducescatter, Collective::allgather, Collective::broadcast, Collective::reduce,
    Collective::gather,        Collective::scatter,   Collective::alltoall,  Collective::alltoallv};

/// Returns the parts of rank `sender`'s staging that one use of an exchange accesses.
std::vector<Range> slots_of(const CpuSlots& slots, Collective collective, int world, int sender) {
  std::vector<Range> ranges;
  for (int receiver = 0; receiver < world; ++receiver) {
    if (receiver == sender && !slots.own) continue;
    const uint64_t bytes = std::min(slots.chunk, slots.stride);
    ranges.push_back({"for " + std::to_string(receiver), slots.offset(sender, receiver), bytes});
  }
  if (sends_the_same(collective)) ranges = {{"for all", 0, slots.chunk}};
  return ranges;
}

TEST_P(CpuRegion, slots_of_an_exchange_share_no_byte_and_lie_in_the_staging) {
  for (const uint64_t payload : kPayloads) {
    const CpuLayout layout = cpu_layout(GetParam(), payload);
    for (const Collective collective : kExchanges) {
      for (const uint64_t longest : {uint64_t{1}, uint64_t{65}, uint64_t{100000}, kAnyMessage}) {
        const CpuSlots slots = cpu_slots(layout, collective, longest, GetParam());
        EXPECT_GT(slots.chunk, 0u);
        EXPECT_EQ(slots.chunk % kCpuLineBytes, 0u);
        EXPECT_TRUE(sends_the_same(collective) || slots.stride >= std::min(slots.chunk, longest));
        for (int sender = 0; sender < GetParam(); ++sender) {
          const std::vector<Range> ranges = slots_of(slots, collective, GetParam(), sender);
          EXPECT_EQ(find_overlap(ranges, layout.staging_bytes), "") << longest;
        }
      }
    }
  }
}

}  // namespace
}  // namespace collx
