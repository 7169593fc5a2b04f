// Tests that the interpreter of expressions computes the same bits at every level of vector
// instructions and with any layout of the operands.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/simd/expression_kernels.h"
#include "simd_levels.h"

namespace collx::cpu {
namespace {

using Bytes = std::vector<char>;

Expression parsed(const std::string& text, DType dtype) {
  Expression expression;
  const auto wrong = parse_expression(text, dtype, expression);
  EXPECT_FALSE(wrong) << *wrong;
  return expression;
}

/// Evaluates n elements with a stride in bytes. The results have the same stride.
Bytes evaluated(const Expression& e, const Bytes& value, const Bytes& extra, int64_t stride,
                int64_t n) {
  Bytes result(static_cast<size_t>(n * stride), 77);
  Bytes input = value, other = extra;
  char* data[] = {result.data(), input.data(), other.data()};
  const int64_t strides[] = {stride, stride, stride};
  expression_kernel()(e, {data, strides, n});
  return result;
}

struct Sample {
  DType dtype;
  const char* text;
};
constexpr Sample kSamples[] = {
    {DType::float32, "value.float32;extra.float32 0;add.float32 0 1;relu.float32 2"},
    {DType::float32, "value.float32;exp.float32 0"},
    {DType::float32, "value.float32;tanh.float32 0;silu.float32 0;minimum.float32 1 2"},
    {DType::float32,
     "value.float32;sigmoid.float32 0;rsqrt.float32 1;log.float32 0;"
     "maximum.float32 2 3"},
    {DType::float32, "value.float32;cast.float16 0"},
    {DType::float32, "value.float32;cast.bfloat16 0"},
    {DType::float32, "value.float32;cast.int64 0;cast.int8 1"},
    {DType::float16,
     "value.float16;cast.float32 0;extra.float16 0;cast.float32 2;div.float32 1 3;"
     "cast.float16 4"},
    {DType::bfloat16, "value.bfloat16;cast.float32 0;gelu.float32 1;cast.bfloat16 2"},
    {DType::float64, "value.float64;extra.float64 0;lt.bool 0 1;where.float64 2 0 1;exp.float64 3"},
    {DType::int32,
     "value.int32;constant.int32 00000007;floor_divide.int32 0 1;remainder.int32 0 1;"
     "mul.int32 2 3"},
    {DType::int8, "value.int8;extra.int8 0;minimum.int8 0 1;abs.int8 2;neg.int8 3"},
    // Values are reused: as the second operand, twice, or after a statement that is not a step of a
    // run. Others are rounded in between.
    {DType::float32,
     "value.float32;extra.float32 0;sub.float32 1 0;mul.float32 2 2;div.float32 0 3;"
     "cast.bfloat16 4;cast.float32 5;clamp_max.float32 6 2;neg.float32 7;sub.float32 2 8"},
    {DType::bfloat16,
     "value.bfloat16;cast.float32 0;extra.bfloat16 0;cast.float32 2;sub.float32 3 1;"
     "lt.bool 4 3;abs.float32 1;where.float32 5 4 6;cast.float16 7;cast.float32 8;"
     "maximum.float32 1 9;mul.float32 10 4;cast.bfloat16 11"},
    {DType::float16,
     "value.float16;cast.float32 0;constant.float32 3f000000;mul.float32 2 1;"
     "silu.float32 3;extra.float16 0;cast.float32 5;add.float32 6 4;relu.float32 7;"
     "cast.float16 8"},
    // A uniform extra may be a number, a zero or NaN.
    {DType::float32, "value.float32;extra.float32 0;minimum.float32 0 1;abs.float32 2"},
    {DType::float32, "value.float32;extra.float32 0;clamp_min.float32 0 1"},
    {DType::float32, "value.float32;extra.float32 0;abs.float32 0;minimum.float32 1 2"},
    {DType::bfloat16,
     "value.bfloat16;cast.float32 0;extra.bfloat16 0;cast.float32 2;maximum.float32 3 1;"
     "clamp_max.float32 4 3;cast.bfloat16 5"},
    // Results with another type, and without any op.
    {DType::bfloat16, "value.bfloat16;cast.float32 0;abs.float32 1;cast.float16 2"},
    {DType::bfloat16,
     "value.bfloat16;cast.float32 0;extra.bfloat16 0;cast.float32 2;add.float32 1 3"},
    {DType::float32, "value.float32;extra.float32 0;add.float32 0 1;cast.bfloat16 2"},
    {DType::bfloat16, "value.bfloat16;extra.bfloat16 0"},
    {DType::float32, "value.float32;constant.float32 40490fdb"},
};

/// Returns random elements, including zeros of both signs. Half of the float32 values are moderate.
Bytes random_elements(std::mt19937_64& random, DType dtype, int64_t n, int64_t stride) {
  const auto size = static_cast<size_t>(dtype_size(dtype));
  Bytes bytes(static_cast<size_t>(n * stride));
  for (int64_t i = 0; i < n; ++i) {
    uint64_t word = random();
    const auto moderate = static_cast<float>(static_cast<int64_t>(word % 4001) - 2000) / 99;
    if (dtype == DType::float32 && i % 2 == 0) std::memcpy(&word, &moderate, 4);
    if (word % 7 == 0) word = (word >> 8 & 1) << (8 * size - 1);
    std::memcpy(bytes.data() + i * stride, &word, size);
  }
  return bytes;
}

TEST(CpuExpression, EveryLevelGivesTheSameBits) {
  std::mt19937_64 random(5);
  for (const Sample& sample : kSamples) {
    const Expression e = parsed(sample.text, sample.dtype);
    const int64_t size = dtype_size(sample.dtype);
    const int64_t made = kValueTypes[static_cast<int>(e.result())].bytes;
    for (const int64_t stride : {std::max(size, made), int64_t{8}, int64_t{24}}) {
      for (const int64_t n : {1, 3, 255, 256, 257, 1003}) {
        const Bytes value = random_elements(random, sample.dtype, n, stride);
        const Bytes extra = random_elements(random, sample.dtype, n, stride);
        std::vector<Bytes> results;
        at_every_level([&] { results.push_back(evaluated(e, value, extra, stride, n)); });
        for (const Bytes& result : results) EXPECT_EQ(result, results[0]) << sample.text;
      }
    }
  }
}

/// The layout of the operands of a line: the columns of a row, and strides in elements.
struct Lying {
  int64_t columns, result, value, extra;
};

/// Evaluates value[i] and extra[i % columns], or extra[i / columns] if its stride in a row is 0.
Bytes laid_out(const Expression& e, DType dtype, const Bytes& value, const Bytes& extra, int64_t n,
               const Lying& lies) {
  const int64_t size = dtype_size(dtype), rows = n / lies.columns;
  const int64_t made = kValueTypes[static_cast<int>(e.result())].bytes;
  const auto spread = [&](const Bytes& from, int64_t apart) {
    Bytes to(static_cast<size_t>(n * size * std::max<int64_t>(apart, 1)), 55);
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(to.data() + i * size * std::max<int64_t>(apart, 1), from.data() + i * size,
                  static_cast<size_t>(size));
    }
    return to;
  };
  Bytes v = spread(value, lies.value), x = spread(extra, lies.extra);
  Bytes result(static_cast<size_t>(n * made * lies.result + 64), 77);
  char* data[] = {result.data(), v.data(), x.data()};
  std::vector<int64_t> strides = {made * lies.result, size * lies.value, size * lies.extra};
  strides.resize(static_cast<size_t>(2 + e.extras));
  strides.insert(strides.end(), {strides[0] * lies.columns, strides[1] * lies.columns,
                                 lies.extra == 0 ? size : 0});
  expression_kernel()(e, {data, strides.data(), lies.columns, rows});
  for (size_t i = result.size() - 64; i < result.size(); ++i) EXPECT_EQ(result[i], 77);
  Bytes dense(static_cast<size_t>(n * made));
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(dense.data() + i * made, result.data() + i * made * lies.result,
                static_cast<size_t>(made));
  }
  return dense;
}

TEST(CpuExpression, HowOperandsLieDoesNotMatter) {
  std::mt19937_64 random(6);
  for (const Sample& sample : kSamples) {
    const Expression e = parsed(sample.text, sample.dtype);
    const auto size = static_cast<size_t>(dtype_size(sample.dtype));
    for (const int64_t columns : {1, 7, 64, 520, 1031}) {
      const int64_t rows = columns > 600 ? 2 : 3, n = rows * columns;
      const Bytes value = random_elements(random, sample.dtype, n, static_cast<int64_t>(size));
      const Bytes extra = random_elements(random, sample.dtype, n, static_cast<int64_t>(size));
      at_every_level([&] {
        for (const int64_t step : {0, 1, 2}) {
          // The expected results, element by element.
          Bytes want;
          for (int64_t i = 0; i < n; ++i) {
            const auto at = [&](const Bytes& of, int64_t k) {
              return Bytes(of.begin() + k * static_cast<int64_t>(size),
                           of.begin() + (k + 1) * static_cast<int64_t>(size));
            };
            const Bytes one =
                laid_out(e, sample.dtype, at(value, i),
                         at(extra, step == 0 ? i / columns : i % columns), 1, {1, 1, 1, 1});
            want.insert(want.end(), one.begin(), one.end());
          }
          for (const auto& [result, of_value] :
               {std::pair(1, 1), std::pair(2, 1), std::pair(1, 3)}) {
            ASSERT_EQ(laid_out(e, sample.dtype, value, extra, n, {columns, result, of_value, step}),
                      want)
                << sample.text << ", " << columns << " columns, " << result << of_value << step;
          }
        }
      });
    }
  }
}

TEST(CpuExpression, ResultsMayTakeThePlaceOfTheValueOrOfAnExtra) {
  std::mt19937_64 random(7);
  for (const Sample& sample : kSamples) {
    const Expression e = parsed(sample.text, sample.dtype);
    if (e.result() != static_cast<ValueType>(sample.dtype)) continue;
    const int64_t size = dtype_size(sample.dtype), n = 1111;
    const Bytes value = random_elements(random, sample.dtype, n, size);
    const Bytes extra = random_elements(random, sample.dtype, n, size);
    at_every_level([&] {
      const Bytes want = evaluated(e, value, extra, size, n);
      for (const int operand : {1, 2}) {
        Bytes v = value, x = extra;
        char* data[] = {operand == 1 ? v.data() : x.data(), v.data(), x.data()};
        const int64_t strides[] = {size, size, size};
        expression_kernel()(e, {data, strides, n});
        EXPECT_EQ(operand == 1 ? v : x, want) << sample.text << ", operand " << operand;
      }
    });
  }
}

TEST(CpuExpression, SixteenBitFloatsSurviveTheirWideType) {
  for (const auto& [dtype, text, infinity] :
       {std::tuple(DType::float16, "value.float16;cast.float32 0;cast.float16 1", 0x7c00),
        std::tuple(DType::bfloat16, "value.bfloat16;cast.float32 0;cast.bfloat16 1", 0x7f80)}) {
    const Expression e = parsed(text, dtype);
    Bytes value(2 << 16);
    for (uint32_t i = 0; i < 1 << 16; ++i) {
      const auto half = static_cast<uint16_t>(i);
      std::memcpy(value.data() + 2 * i, &half, 2);
    }
    at_every_level([&] {
      const Bytes result = evaluated(e, value, value, 2, 1 << 16);
      for (uint32_t i = 0; i < 1 << 16; ++i) {
        uint16_t got;
        std::memcpy(&got, result.data() + 2 * i, 2);
        const bool nan = static_cast<int>(i & 0x7fff) > infinity;
        ASSERT_TRUE(nan ? (got & 0x7fff) > infinity : got == i) << i;
      }
    });
  }
}

TEST(CpuExpression, RoundingIsToNearestEven) {
  const Expression e = parsed("value.float32;cast.float16 0", DType::float32);
  // 65519.996 is the largest value that does not become infinity. 2^-25 is halfway between 0 and
  // the smallest value.
  const float values[] = {65519.996f, 65520.0f, 0x1p-25f, 0x1.8p-24f, 1.00048828125f, -0.0f};
  const uint16_t expected[] = {0x7bff, 0x7c00, 0x0000, 0x0002, 0x3c00, 0x8000};
  at_every_level([&] {
    uint16_t got[6];
    char input[sizeof(values)];
    std::memcpy(input, values, sizeof(values));
    char* data[] = {reinterpret_cast<char*>(got), input};
    const int64_t strides[] = {2, 4};
    expression_kernel()(e, {data, strides, 6});
    for (int i = 0; i < 6; ++i) EXPECT_EQ(got[i], expected[i]) << values[i];
  });
}

}  // namespace
}  // namespace collx::cpu
