// Tests that every value is converted to its name in Python and back, and that no other name is
// accepted.
#include <gtest/gtest.h>

#include <set>
#include <string_view>

#include "protocol/names.h"

namespace collx {
namespace {

template <typename E, size_t N>
void expect_round_trip(const std::array<std::string_view, N>& names) {
  static_assert(N == static_cast<size_t>(E::count));
  std::set<std::string_view> seen;
  for (size_t i = 0; i < N; ++i) {
    const E value = static_cast<E>(i);
    EXPECT_FALSE(name_of(value).empty());
    EXPECT_TRUE(seen.insert(name_of(value)).second) << name_of(value) << " twice";
    EXPECT_EQ(find_name<E>(names, name_of(value)), value);
  }
}

TEST(Names, every_value_is_found_by_its_name) {
  expect_round_trip<DType>(kDTypeNames);
  expect_round_trip<ReduceOp>(kReduceOpNames);
  expect_round_trip<Collective>(kCollectiveNames);
  expect_round_trip<Algorithm>(kAlgorithmNames);
}

TEST(Names, stand_beside_the_value_that_they_mean) {
  EXPECT_EQ(name_of(DType::uint8), "uint8");
  EXPECT_EQ(name_of(ReduceOp::prod), "prod");
  EXPECT_EQ(name_of(Collective::allreduce), "allreduce");
  EXPECT_EQ(name_of(Algorithm::automatic), "auto");
  EXPECT_EQ(name_of(Algorithm::pull_push), "pull_push");
  EXPECT_EQ(name_of(Algorithm::fallback), "fallback");
}

TEST(Names, product_is_prod_as_in_torch) {
  EXPECT_EQ(parse_reduce_op("product"), ReduceOp::prod);
  EXPECT_EQ(parse_reduce_op("prod"), ReduceOp::prod);
}

TEST(Names, nothing_else_is_accepted) {
  for (const std::string_view wrong : {"", "SUM", "sum ", "mean", "premul_sum", "average"}) {
    EXPECT_FALSE(parse_reduce_op(wrong).has_value()) << wrong;
  }
  for (const std::string_view wrong : {"", "automatic", "Auto", "ring", "oneshot", "count"}) {
    EXPECT_FALSE(parse_algorithm(wrong).has_value()) << wrong;
  }
}

TEST(Names, sizes_are_those_of_the_dtypes) {
  static_assert(dtype_size(DType::float64) == 8 && dtype_size(DType::int64) == 8);
  static_assert(dtype_size(DType::float32) == 4 && dtype_size(DType::int32) == 4);
  static_assert(dtype_size(DType::float16) == 2 && dtype_size(DType::bfloat16) == 2);
  static_assert(dtype_size(DType::int8) == 1 && dtype_size(DType::uint8) == 1);
}

TEST(Names, floats_alone_have_a_sentinel) {
  for (size_t i = 0; i < kDTypeNames.size(); ++i) {
    const bool floating = kDTypeNames[i].find("float") != std::string_view::npos;
    EXPECT_EQ(has_sentinel(static_cast<DType>(i)), floating) << kDTypeNames[i];
  }
}

}  // namespace
}  // namespace collx
