// Tests the element offsets of an epilogue's extra tensors, its numbers, and the hash of its text.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <vector>

#include "protocol/epilogue.h"
#include "protocol/expression.h"

namespace collx {
namespace {

struct Case {
  std::vector<int64_t> sizes, strides;  // outermost first
};

uint64_t numel_of(const Case& c) {
  uint64_t numel = 1;
  for (const int64_t size : c.sizes) numel *= static_cast<uint64_t>(size);
  return numel;
}

int64_t expected(const Case& c, uint64_t i) {
  int64_t offset = 0;
  for (size_t d = c.sizes.size(); d-- > 0;) {
    const auto size = static_cast<uint64_t>(c.sizes[d]);
    offset += static_cast<int64_t>(i % size) * c.strides[d];
    i /= size;
  }
  return offset;
}

ExtraTensor laid_out(const Case& c) {
  ExtraTensor extra;
  EXPECT_TRUE(lay_out_extra(nullptr, c.sizes.data(), c.strides.data(),
                            static_cast<int>(c.sizes.size()), 2, extra));
  return extra;
}

void expect_offsets(const Case& c) {
  const ExtraTensor extra = laid_out(c);
  const uint64_t numel = numel_of(c);
  std::mt19937_64 random(numel);
  for (int k = 0; k < 2000; ++k) {
    const uint64_t i = k == 0 ? 0 : k == 1 ? numel - 1 : random() % numel;
    ASSERT_EQ(offset_of(extra, i), expected(c, i)) << i << " of " << numel;
  }
}

TEST(Extras, OffsetsAreThoseOfTheirStrides) {
  std::mt19937_64 random(1);
  for (int k = 0; k < 500; ++k) {
    Case c;
    for (uint64_t d = 0, dims = 1 + random() % 4; d < dims; ++d) {
      c.sizes.push_back(1 + static_cast<int64_t>(random() % (k % 2 == 0 ? 255 : 9)));
      c.strides.push_back(static_cast<int64_t>(random() % 5) * (1 << (random() % 12)));
    }
    expect_offsets(c);
  }
}

// Inaccurate reciprocals first fail next to a multiple of the size.
TEST(Extras, ReciprocalsGiveEveryQuotient) {
  for (const int64_t size : {2, 3, 7, 255, 4095, 4097, 65535, 1 << 20, 0x7FFFFFFF}) {
    const Case c{{0xFFFFFFFF / size, size}, {1 << 20, 1}};
    const ExtraTensor extra = laid_out(c);
    ASSERT_TRUE(has_reciprocals(extra));
    for (uint64_t outer = 0; outer < static_cast<uint64_t>(c.sizes[0]);
         outer += 1 + static_cast<uint64_t>(c.sizes[0]) / 5000) {
      for (const uint64_t inner : {uint64_t{0}, static_cast<uint64_t>(size) - 1}) {
        const uint64_t i = outer * static_cast<uint64_t>(size) + inner;
        ASSERT_EQ(offset_of(extra, i), expected(c, i)) << i << " by " << size;
      }
    }
  }
}

template <Lies kLies, int kDims>
void expect_known(const std::vector<int64_t>& sizes, std::vector<int64_t> strides) {
  strides.back() = kLies == Lies::vectors ? 1 : 0;
  const Case c{sizes, strides};
  const ExtraTensor extra = laid_out(c);
  ASSERT_EQ(extra.lies, kLies);
  ASSERT_EQ(std::max(extra.dims, 2), kDims);
  for (uint64_t i = 0; i < numel_of(c); ++i) {
    ASSERT_EQ((offset_by_reciprocals<ExtraForm{kLies, kDims}>(extra, i)), expected(c, i)) << i;
  }
}

TEST(Extras, WhatAKernelIsCompiledToKnowGivesTheSameOffsets) {
  expect_known<Lies::vectors, 2>({640}, {1});
  expect_known<Lies::vectors, 2>({9, 64}, {0, 1});
  expect_known<Lies::vectors, 3>({3, 5, 32}, {32, 0, 1});
  expect_known<Lies::vectors, 4>({3, 5, 7, 16}, {16, 0, 48, 1});
  expect_known<Lies::same, 2>({640}, {0});
  expect_known<Lies::same, 2>({9, 64}, {3, 0});
  expect_known<Lies::same, 3>({3, 5, 32}, {7, 2, 0});
  expect_known<Lies::same, 4>({3, 5, 7, 16}, {5, 0, 1, 0});
}

TEST(Extras, AFormIsWholeIfAllAre) {
  EpilogueArguments arguments;
  arguments.extra[0] = laid_out({{9, 64}, {0, 1}});
  arguments.extra[1] = laid_out({{9, 64}, {1, 0}});
  arguments.extra[2] = laid_out({{9, 64}, {64, 2}});  // every other element
  const EpilogueForm whole = form_of(arguments, 2, true);
  EXPECT_TRUE(whole.whole);
  EXPECT_EQ(whole.extra[0], (ExtraForm{Lies::vectors, 2}));
  EXPECT_EQ(whole.extra[1], (ExtraForm{Lies::same, 2}));
  EXPECT_EQ(whole.extra[2], ExtraForm{});
  EXPECT_EQ(form_of(arguments, 3, true), EpilogueForm{});
  EXPECT_EQ(form_of(arguments, 2, false), EpilogueForm{});
  char kept = 0;
  arguments.value = &kept;
  EXPECT_EQ(form_of(arguments, 3, true), (EpilogueForm{false, true}));
}

TEST(Extras, LargeOutputsAreDivided) {
  const Case c{{1 << 17, 3, 1 << 16}, {1 << 16, 0, 1}};
  EXPECT_FALSE(has_reciprocals(laid_out(c)));
  expect_offsets(c);
  const Case dense{{1 << 20, 1 << 16}, {1 << 16, 1}};
  EXPECT_TRUE(
      has_reciprocals(laid_out(dense)));  // merged to one dimension, which needs no division
  expect_offsets(dense);
}

TEST(Expressions, HashIsTheSameInEveryProcess) {
  static_assert(hash_of_text("") == 0xcbf29ce484222325ull);
  static_assert(hash_of_text("foobar") == 0x85944171f73967e8ull);
}

TEST(Expressions, NumbersAreConvertedAsPyTorchDoes) {
  EXPECT_EQ(bits_of_number(0.1, ValueType::float32), 0x3dcccccdu);
  EXPECT_EQ(bits_of_number(-1, ValueType::int8), 0xffu);
  EXPECT_EQ(bits_of_number(300, ValueType::uint8), 44u);
  EXPECT_EQ(bits_of_number(-2.5, ValueType::int64), ~uint64_t{0} - 1);
  EXPECT_EQ(bits_of_number(0.5, ValueType::boolean), 1u);
  EXPECT_EQ(bits_of_number(0x1p63, ValueType::int64), std::nullopt);
  EXPECT_EQ(bits_of_number(std::nan(""), ValueType::int32), std::nullopt);
}

}  // namespace
}  // namespace collx
