// The interpreter of expressions: the same bits at every level of vector instructions, on any line.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/simd/expression_kernels.h"
#include "cpu/simd/reduce_kernels.h"

namespace collx::cpu {
namespace {

using Bytes = std::vector<char>;

template <typename Body>
void at_every_level(Body body) {
  const SimdLevel best = simd_level();
  for (SimdLevel level : {SimdLevel::portable, SimdLevel::avx2, SimdLevel::avx512}) {
    if (set_simd_level(level)) body();
  }
  set_simd_level(best);
}

Expression parsed(const std::string& text, DType dtype) {
  Expression expression;
  const auto wrong = parse_expression(text, dtype, expression);
  EXPECT_FALSE(wrong) << *wrong;
  return expression;
}

/// Of n elements, every so many bytes, into results that lie alike.
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
};

TEST(CpuExpression, EveryLevelGivesTheSameBits) {
  std::mt19937_64 random(5);
  for (const Sample& sample : kSamples) {
    const Expression e = parsed(sample.text, sample.dtype);
    const int size = dtype_size(sample.dtype);
    for (const int64_t stride : {int64_t{8}, int64_t{24}}) {
      for (const int64_t n : {1, 3, 255, 256, 257, 1003}) {
        Bytes value(static_cast<size_t>(n * stride)), extra = value;
        for (Bytes* bytes : {&value, &extra}) {
          for (int64_t i = 0; i < n; ++i) {
            uint64_t word = random();
            // Half of them of moderate size.
            const auto moderate = static_cast<float>(static_cast<int64_t>(word % 4001) - 2000) / 99;
            if (sample.dtype == DType::float32 && i % 2 == 0) std::memcpy(&word, &moderate, 4);
            std::memcpy(bytes->data() + i * stride, &word, static_cast<size_t>(size));
          }
        }
        std::vector<Bytes> results;
        at_every_level([&] { results.push_back(evaluated(e, value, extra, stride, n)); });
        for (const Bytes& result : results) EXPECT_EQ(result, results[0]) << sample.text;
      }
    }
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
  // 65519.996 is the last that does not become infinity; 2^-25 lies between 0 and the smallest.
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
