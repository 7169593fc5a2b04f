// Tests the comparison of epochs, which increase forever: the signed difference is correct across
// the wrap-around.
#include <gtest/gtest.h>

#include "protocol/cuda_layout.h"
#include "protocol/epoch.h"

namespace collx {
namespace {

using Reached = bool (*)(uint32_t seen, uint32_t expected);

/// Whether `reached` is correct for the epochs shortly before and after each epoch near the
/// wrap-around.
bool tells_apart(Reached reached) {
  for (uint32_t step = 0; step < 0x200; ++step) {
    const uint32_t expected = 0xFFFFFF00u + step;
    for (uint32_t ahead = 0; ahead < 0x200; ++ahead) {
      if (!reached(expected + ahead, expected)) return false;
      if (reached(expected - ahead - 1, expected)) return false;
    }
  }
  return true;
}

TEST(Epoch, is_reached_by_itself_and_later_ones_across_the_wrap_around) {
  EXPECT_TRUE(tells_apart(&epoch_reached));
}

// Negative controls: the obvious comparisons.
TEST(Epoch, plain_comparisons_fail_at_the_wrap_around) {
  EXPECT_FALSE(tells_apart([](uint32_t seen, uint32_t expected) { return seen >= expected; }));
  EXPECT_FALSE(tells_apart([](uint32_t seen, uint32_t expected) { return seen == expected; }));
}

TEST(Epoch, is_right_up_to_half_of_the_range) {
  static_assert(epoch_reached(0x7FFFFFFFu, 0));
  static_assert(!epoch_reached(0x80000000u, 0));
  static_assert(epoch_reached(0, 0xFFFFFFFFu));
}

TEST(Epoch, an_entry_is_one_8_byte_store) {
  static_assert(sizeof(TileEntry) == 8 && alignof(TileEntry) == 8);
  static_assert(offsetof(TileEntry, epoch) == 0 && offsetof(TileEntry, busy) == 4);
}

}  // namespace
}  // namespace collx
