// Tests that partitions of work are complete, disjoint and in rank order, and that the low ranks
// get the remainder.
#include <gtest/gtest.h>

#include "protocol/partition.h"

namespace collx {
namespace {

constexpr uint64_t kSizes[] = {
    0, 1, 2, 3, 7, 8, 15, 16, 17, 100, 101, 4097, 999999937, (1ull << 40) + 13, (1ull << 62) + 5};

TEST(Partition, parts_cover_everything_once_and_in_rank_order) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (const uint64_t n : kSizes) {
      uint64_t next = 0;
      for (int rank = 0; rank < world; ++rank) {
        const Part part = partition(n, world, rank);
        EXPECT_EQ(part.start, next) << n << " over " << world << ", rank " << rank;
        next += part.count;
      }
      EXPECT_EQ(next, n) << n << " over " << world;
    }
  }
}

TEST(Partition, low_ranks_take_one_more) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (const uint64_t n : kSizes) {
      const uint64_t w = static_cast<uint64_t>(world);
      for (int rank = 0; rank < world; ++rank) {
        const bool more = static_cast<uint64_t>(rank) < n % w;
        EXPECT_EQ(partition(n, world, rank).count, n / w + (more ? 1 : 0));
      }
    }
  }
}

TEST(Partition, the_largest_part_is_that_of_rank_0) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (const uint64_t n : kSizes) {
      EXPECT_EQ(largest_part(n, world), partition(n, world, 0).count) << n << " over " << world;
    }
  }
}

TEST(Partition, is_known_at_compile_time) {
  static_assert(partition(10, 4, 0).count == 3 && partition(10, 4, 1).start == 3);
  static_assert(partition(10, 4, 2).start == 6 && partition(10, 4, 3).start == 8);
  static_assert(partition(2, 4, 3).start == 2 && partition(2, 4, 3).count == 0);
  static_assert(round_up(1025, 1024) == 2048 && ceil_div(1024, 1024) == 1);
}

}  // namespace
}  // namespace collx
