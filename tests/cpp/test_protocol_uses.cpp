// Tests that every vector of a call is in exactly one use, in order, for any length of the call.
#include <gtest/gtest.h>

#include "protocol/uses.h"

namespace collx {
namespace {

TEST(Uses, take_every_vector_once_and_are_full_but_for_the_last) {
  for (const uint64_t capacity : {1, 2, 7, 64, 1000}) {
    for (const uint64_t vectors : {0, 1, 6, 7, 8, 63, 64, 65, 999, 1000, 1001, 4000}) {
      uint64_t taken = 0;
      uint32_t number = 0;
      for (Uses uses(vectors, capacity); uses.any(); uses.next()) {
        EXPECT_EQ(uses.first(), taken);
        EXPECT_EQ(uses.number(), number++);
        EXPECT_GE(uses.count(), 1u);
        EXPECT_TRUE(uses.count() == capacity || taken + uses.count() == vectors);
        taken += uses.count();
      }
      EXPECT_EQ(taken, vectors);
      EXPECT_EQ(number, ceil_div(vectors, capacity));
      EXPECT_EQ(Uses(vectors, capacity).all(), number);
    }
  }
}

TEST(Uses, go_past_four_billion_vectors) {
  constexpr uint64_t kVectors = (uint64_t{1} << 32) + 5, kCapacity = uint64_t{1} << 30;
  Uses uses(kVectors, kCapacity);
  while (uses.number() < 4) uses.next();
  EXPECT_EQ(uses.first(), uint64_t{1} << 32);
  EXPECT_EQ(uses.count(), 5u);
  uses.next();
  EXPECT_FALSE(uses.any());
  EXPECT_EQ(uses.number(), 5u);
}

TEST(LaneChunks, those_of_a_reducescatter_are_smaller_than_large_slots) {
  EXPECT_EQ(largest_chunk(Collective::allgather, Algorithm::lanes, 32 << 10), 32u << 10);
  EXPECT_EQ(largest_chunk(Collective::reducescatter, Algorithm::lanes, 32 << 10), 24u << 10);
  EXPECT_EQ(largest_chunk(Collective::reducescatter, Algorithm::lanes, 1 << 10), 1u << 10);
  EXPECT_EQ(largest_chunk(Collective::broadcast, Algorithm::lanes, 32 << 10), 32u << 10);
  EXPECT_EQ(largest_chunk(Collective::broadcast, Algorithm::broadcast_lanes, 32 << 10), 8u << 10);
  EXPECT_EQ(largest_chunk(Collective::broadcast, Algorithm::broadcast_lanes, 4 << 10), 4u << 10);
}

TEST(LaneChunks, take_every_vector_and_fit_into_slots) {
  for (const uint32_t slot : {64u, 192u, 2048u}) {
    for (const int lanes : {1, 3, 132}) {
      for (const uint64_t all : {0, 1, 31, 32, 33, 64 * 132, 64 * 132 + 1, 524288, 1000003}) {
        const LaneChunks chunks(all, lanes, slot);
        EXPECT_LE(chunks.vectors, slot);
        EXPECT_EQ(chunks.vectors * kVectorBytes % 128, 0u);
        const uint64_t round = chunks.vectors * static_cast<uint64_t>(lanes);
        EXPECT_GE(round * chunks.count, all);
        if (all == 0) {
          EXPECT_EQ(chunks.count, 0u);
        } else {
          EXPECT_EQ(chunks.count, ceil_div(all, uint64_t{slot} * static_cast<uint64_t>(lanes)));
          EXPECT_LT(round * (chunks.count - 1), all) << "a round of chunks without a vector";
        }
      }
    }
  }
}

}  // namespace
}  // namespace collx
