// Tests that the kernels at every level of vector instructions compute the bits of the numeric
// contract.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "cpu/calls.h"
#include "scalar_reference.h"
#include "simd_levels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace collx::cpu {
namespace {

bool defined(DType dtype, ReduceOp op) { return op != ReduceOp::avg || has_sentinel(dtype); }

/// Returns random bits. Many of the values reveal the rounding and the order of a sum.
Bytes random_bytes(DType dtype, uint64_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  const size_t size = static_cast<size_t>(dtype_size(dtype));
  Bytes bytes(numel * size);
  for (uint64_t i = 0; i < numel; ++i) {
    uint64_t word = random();
    if (dtype == DType::float32 && i % 2 == 0) {
      // Nearby exponents, so that sums are rounded, or zeros, infinities, NaNs and subnormals.
      word = i % 16 == 0 ? (word & 0x80000007u) | (word >> 40 & 1 ? 0x7f800000u : 0u)
                         : (word & 0x81ffffffu) | 0x3e000000u;
    } else if (dtype == DType::float64 && i % 2 == 0) {
      word = i % 16 == 0 ? (word & 0x8000000000000007u) | (word >> 40 & 1 ? 0x7ff0000000000000u : 0)
                         : (word & 0x801fffffffffffffu) | 0x3fe0000000000000u;
    }
    std::memcpy(bytes.data() + i * size, &word, size);
  }
  return bytes;
}

// Long enough to be processed in several pieces, with a tail.
constexpr uint64_t kLong = 17003;

void expect_reference(const std::vector<Bytes>& inputs, uint64_t numel, DType dtype, ReduceOp op) {
  std::vector<const void*> sources;
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes expected(inputs[0].size()), got(inputs[0].size());
  reference_reduce(sources, expected.data(), numel, dtype, op);
  at_every_level([&] {
    std::fill(got.begin(), got.end(), char(0x5a));
    reduce(sources.data(), int(sources.size()), got.data(), numel, dtype, op);
    EXPECT_EQ(first_difference(got.data(), expected.data(), numel, dtype), "")
        << name_of(dtype) << ' ' << name_of(op) << " of " << sources.size();
  });
}

TEST(CpuArithmetic, every_dtype_and_op_equals_the_scalar_reference_at_every_level) {
  for (const DTypeRow& row : kDTypes) {
    const DType dtype = row.dtype;
    for (const ReduceOp op : kOps) {
      if (!defined(dtype, op)) continue;
      for (const int world : {1, 2, 3, 4, 7, 16}) {
        std::vector<Bytes> inputs;
        for (int r = 0; r < world; ++r) {
          inputs.push_back(random_bytes(dtype, kLong, uint64_t(31 * world + r)));
        }
        expect_reference(inputs, kLong, dtype, op);
      }
    }
  }
}

TEST(CpuArithmetic, every_16_bit_pattern_meets_zero_one_itself_and_its_opposite) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const uint16_t one = dtype == DType::float16 ? 0x3c00 : 0x3f80;
    constexpr uint64_t kAll = 65536;
    const auto pattern = [&](auto value) {
      Bytes bytes(2 * kAll);
      for (uint32_t i = 0; i < kAll; ++i) {
        const uint16_t element = value(uint16_t(i));
        std::memcpy(bytes.data() + 2 * i, &element, 2);
      }
      return bytes;
    };
    const Bytes all = pattern([](uint16_t i) { return i; });
    const std::vector<Bytes> others = {
        pattern([](uint16_t) { return uint16_t(0); }),
        pattern([](uint16_t) { return uint16_t(0x8000); }),
        pattern([&](uint16_t) { return one; }),
        pattern([](uint16_t i) { return i; }),
        pattern([](uint16_t i) { return uint16_t(i ^ 0x8000); }),
        pattern([](uint16_t i) { return uint16_t(i + 1); }),
        pattern([](uint16_t i) { return uint16_t(i * 40503u); }),
    };
    for (const ReduceOp op : kOps) {
      for (const Bytes& other : others) expect_reference({all, other}, kAll, dtype, op);
      expect_reference({all, others[3], others[6]}, kAll, dtype, op);
    }
  }
}

TEST(CpuArithmetic, every_length_and_alignment_writes_its_elements_and_no_byte_more) {
  constexpr uint64_t kMost = 200, kGuard = 128;
  for (const DTypeRow& row : kDTypes) {
    const DType dtype = row.dtype;
    const uint64_t size = uint64_t(dtype_size(dtype));
    const Bytes a = random_bytes(dtype, 512, 1), b = random_bytes(dtype, 512, 2);
    for (uint64_t numel = 0; numel <= kMost; ++numel) {
      // Inputs and output are only aligned to elements, each with a different offset.
      const uint64_t shift = numel % 7;
      const std::vector<const void*> sources = {a.data() + shift * size,
                                                b.data() + (shift + 3) % 5 * size};
      Bytes expected(kMost * size), got(kMost * size + 2 * kGuard + 64 * size, char(0x5a));
      reference_reduce(sources, expected.data(), numel, dtype, ReduceOp::sum);
      at_every_level([&] {
        std::fill(got.begin(), got.end(), char(0x5a));
        char* const output = got.data() + kGuard + numel % 3 * size;
        reduce(sources.data(), 2, output, numel, dtype, ReduceOp::sum);
        ASSERT_EQ(first_difference(output, expected.data(), numel, dtype), "") << numel;
        for (const char* c = got.data(); c < got.data() + got.size(); ++c) {
          ASSERT_TRUE((c >= output && c < output + numel * size) || *c == 0x5a);
        }
      });
    }
  }
}

TEST(CpuArithmetic, the_output_may_be_any_of_the_inputs) {
  for (const DTypeRow& row : kDTypes) {
    const DType dtype = row.dtype;
    const std::vector<Bytes> inputs = {random_bytes(dtype, 333, 1), random_bytes(dtype, 333, 2),
                                       random_bytes(dtype, 333, 3)};
    Bytes expected(inputs[0].size());
    reference_reduce({inputs[0].data(), inputs[1].data(), inputs[2].data()}, expected.data(), 333,
                     dtype, ReduceOp::sum);
    for (size_t target = 0; target < 3; ++target) {
      std::vector<Bytes> copies = inputs;
      const void* sources[] = {copies[0].data(), copies[1].data(), copies[2].data()};
      reduce(sources, 3, copies[target].data(), 333, dtype, ReduceOp::sum);
      EXPECT_EQ(first_difference(copies[target].data(), expected.data(), 333, dtype), "");
    }
  }
}

TEST(CpuArithmetic, the_order_of_ranks_is_the_order_of_the_sum) {
  const float a = 1.0f, b = 1e8f, c = -1e8f;
  const auto sum = [](const float* x, const float* y, const float* z) {
    const void* sources[] = {x, y, z};
    float result = 0;
    reduce(sources, 3, &result, 1, DType::float32, ReduceOp::sum);
    return result;
  };
  EXPECT_EQ(sum(&a, &b, &c), 0.0f);
  EXPECT_EQ(sum(&b, &c, &a), 1.0f);
}

TEST(CpuArithmetic, integers_have_no_average_and_say_so) {
  for (const DType dtype : {DType::int32, DType::int64, DType::int8, DType::uint8}) {
    EXPECT_THROW(reduce_kernel(dtype, ReduceOp::avg), std::invalid_argument);
  }
}

#if defined(__x86_64__)
class FlushingCaller : public testing::Test {
 protected:
  void SetUp() override { _mm_setcsr(kFlushing); }
  void TearDown() override { _mm_setcsr(saved_); }
  // Flush-to-zero, denormals-are-zero, rounding toward zero, exceptions masked.
  static constexpr unsigned kFlushing = 0x1f80 | 0x8000 | 0x0040 | 0x6000;
  const unsigned saved_ = _mm_getcsr();
};

TEST_F(FlushingCaller, neither_changes_a_result_nor_finds_its_own_state_changed) {
  const float subnormal = 1e-42f, third = 1.0f / 3;
  const float inputs[2][2] = {{subnormal, third}, {subnormal, third}};
  const void* sources[] = {inputs[0], inputs[1]};
  uint32_t got[2];
  reduce(sources, 2, got, 2, DType::float32, ReduceOp::sum);
  EXPECT_EQ(_mm_getcsr(), kFlushing);
  _mm_setcsr(saved_);
  const float sums[2] = {subnormal + subnormal, third + third};
  EXPECT_EQ(got[0], std::bit_cast<uint32_t>(sums[0]));
  EXPECT_EQ(got[1], std::bit_cast<uint32_t>(sums[1]));
}

// Negative control: the state affects an ordinary sum.
TEST_F(FlushingCaller, would_lose_a_subnormal_by_itself) {
  volatile float subnormal = 1e-42f;
  volatile float sum = subnormal + subnormal;
  _mm_setcsr(saved_);
  EXPECT_EQ(std::bit_cast<uint32_t>(float(sum)), 0u);
}
#endif

}  // namespace
}  // namespace collx::cpu
