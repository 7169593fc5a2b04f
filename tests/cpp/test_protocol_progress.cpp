// Tests which ranks a running call may wait for, given the progress of all ranks.
#include <gtest/gtest.h>

#include "protocol/progress.h"

namespace collx {
namespace {

constexpr bool kIn = true, kOut = false;

TEST(Progress, a_rank_is_missing_that_is_in_no_call_and_behind) {
  constexpr Progress late[] = {{7, kIn}, {7, kOut}, {7, kIn}};
  static_assert(missing_ranks(late, 0, 3) == 0b010);
  static_assert(missing_ranks(late, 2, 3) == 0b010);
  constexpr Progress several[] = {{7, kOut}, {7, kIn}, {6, kOut}};
  static_assert(missing_ranks(several, 1, 3) == 0b101);
}

TEST(Progress, a_rank_that_is_ahead_or_in_the_call_is_not_missing) {
  constexpr Progress none[] = {{7, kIn}, {7, kIn}, {8, kOut}, {9, kIn}};
  static_assert(missing_ranks(none, 0, 4) == 0);
}

TEST(Progress, a_rank_that_waits_in_an_earlier_call_is_missing_only_if_no_other_is) {
  constexpr Progress chain[] = {{7, kIn}, {6, kIn}, {5, kOut}};
  static_assert(missing_ranks(chain, 0, 3) == 0b100);
  static_assert(missing_ranks(chain, 1, 3) == 0b100);
  constexpr Progress earlier[] = {{7, kIn}, {6, kIn}, {7, kIn}};
  static_assert(missing_ranks(earlier, 0, 3) == 0b010);
}

}  // namespace
}  // namespace collx
