// Tests how fused normalizations assign rows to blocks and slots, and the arithmetic of their
// scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "norm_reference.h"
#include "protocol/norm_plan.h"

namespace collx {
namespace {

/// Returns what a device with this number of multiprocessors would report. Each has room for 1024
/// threads and `blocks` blocks. They form groups of 16 and one of the remaining ones. Clusters do
/// not span groups.
Residency device(int multiprocessors, int blocks, bool clusters) {
  Residency r;
  Residency::for_each(r, [&](uint32_t threads, uint32_t size, int32_t& held) {
    const int each = std::min(1024 / static_cast<int>(threads), blocks);
    const int of = static_cast<int>(size);
    held = size == 1  ? each * multiprocessors
           : clusters ? multiprocessors / 16 * (16 * each / of) + multiprocessors % 16 * each / of
                      : 0;
  });
  return r;
}

NormRequest request(uint64_t rows, uint64_t cols, int world = 4, DType dtype = DType::bfloat16) {
  NormRequest r;
  r.collective = Collective::allreduce_residual_rmsnorm_fp8;
  r.device = DeviceKind::cuda;
  r.dtype = dtype;
  r.world = world;
  r.rows = rows;
  r.cols = cols;
  r.bytes = rows * cols * static_cast<uint64_t>(dtype_size(dtype));
  r.room = 132;
  r.spare_room = 132;
  r.capabilities.residency = device(132, 12, true);
  r.options.quantization = Quantization::e4m3fn;
  r.results = {true, false, true};
  return r;
}

/// Visits every combination that the tests below check.
template <typename F>
void for_each_request(F f) {
  for (const uint64_t rows : {1, 2, 8, 16, 33, 64, 513, 2048}) {
    for (const uint64_t cols : {1, 8, 100, 384, 4096, 5000, 8192, 16384, 20000, 70000, 300000}) {
      for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
        for (const int world : {2, 3, 4, 8}) {
          for (const Algorithm algorithm :
               {Algorithm::automatic, Algorithm::oneshot_push, Algorithm::twoshot_push,
                Algorithm::oneshot_pull, Algorithm::twoshot_pull, Algorithm::fallback}) {
            NormRequest r = request(rows, cols, world, dtype);
            r.algorithm = algorithm;
            f(r);
            r.options.rounding = Rounding::parity;
            r.options.scale_mode = ScaleMode::group;
            r.options.quant_group_size = 16;
            r.results.normalized = true;
            f(r);
            r.options.quant_group_size = 4096;
            r.max_blocks = 3;
            f(r);
          }
        }
      }
    }
  }
}

/// Payloads from the smallest region to the default.
const std::vector<uint64_t> kPayloads = {1 << 20, 8 << 20, kDefaultPayloadBytes};

TEST(NormPlan, RowsFitTheirSlotsAndBlocks) {
  for (const uint64_t payload : kPayloads) {
    for_each_request([&](const NormRequest& r) {
      const CudaLayout layout = cuda_layout(r.world, payload);
      const NormPlan p = plan_norm(r, layout);
      const NormShape& s = p.shape;
      const uint64_t vectors =
          ceil_div<uint64_t>(r.cols * static_cast<uint64_t>(dtype_size(r.dtype)), kVectorBytes);
      ASSERT_GE(uint64_t{s.steps} * s.step_vectors(), vectors);
      ASSERT_LE(s.threads, static_cast<uint32_t>(kFullBlock));
      ASSERT_EQ(s.threads % kTileVectors, 0u);
      ASSERT_TRUE(std::has_single_bit(s.threads));
      ASSERT_TRUE(std::has_single_bit(s.cluster));
      ASSERT_LE(s.cluster, kMostCluster);
      ASSERT_EQ(p.plan.blocks % static_cast<int>(s.cluster), 0);
      if (r.max_blocks > 0) {
        ASSERT_LE(p.plan.blocks, r.max_blocks);
      }
      if (s.steps > 1) {
        ASSERT_EQ(s.cluster, 1u) << "a long row is one block's";
        ASSERT_GT(p.spilled, 0u);
      }
      if (p.plan.algorithm == Algorithm::fallback) return;
      ASSERT_GE(s.rows_per_use, 1u);
      const bool owned = row_of(p.plan.algorithm).stages == 2;
      if (!owned && p.plan.algorithm != Algorithm::oneshot_push) return;
      const SlotArea& area = owned || s.large_slots ? layout.twoshot : layout.oneshot;
      ASSERT_LE(uint64_t{s.rows_per_use} * s.cluster * s.piece_tiles, area.tiles);
      ASSERT_LE(s.piece_tiles, s.threads) << "a thread for each tile";
      ASSERT_GE((s.large_slots ? 2 : 1) * s.piece_tiles * kTileVectors, s.threads);
      if (owned) {
        ASSERT_EQ(s.steps, 1u);
        ASSERT_GE(s.piece_tiles * kTileBytes, detail::passed_bytes(s, r, p.plan.algorithm));
      }
    });
  }
}

TEST(NormPlan, WhatRanksExchangeDoesNotDependOnSpareBlocks) {
  for_each_request([&](const NormRequest& r) {
    NormRequest other = r;
    other.spare_room = 0;
    const CudaLayout layout = cuda_layout(r.world, kDefaultPayloadBytes);
    const NormPlan a = plan_norm(r, layout), b = plan_norm(other, layout);
    ASSERT_EQ(a.plan.algorithm, b.plan.algorithm);
    ASSERT_EQ(a.shape.threads, b.shape.threads);
    ASSERT_EQ(a.shape.cluster, b.shape.cluster);
    ASSERT_EQ(a.shape.steps, b.shape.steps);
    ASSERT_EQ(a.shape.piece_tiles, b.shape.piece_tiles);
    ASSERT_EQ(a.shape.rows_per_use, b.shape.rows_per_use);
  });
}

TEST(NormPlan, WithoutClustersEveryRowIsOneBlocks) {
  for (const uint64_t payload : kPayloads) {
    for_each_request([&](NormRequest r) {
      r.capabilities.residency = device(108, 9, false);
      r.room = r.spare_room = 108;
      const NormPlan p = plan_norm(r, cuda_layout(r.world, payload));
      ASSERT_EQ(p.shape.cluster, 1u);
      ASSERT_LE(static_cast<uint64_t>(p.plan.blocks),
                r.capabilities.residency.clusters(p.shape.threads, 1));
    });
  }
}

TEST(NormPlan, GridsFitWhatTheDeviceHolds) {
  for (const int groups : {1, 5, 8}) {
    for (const int spare : {0, 1}) {
      for_each_request([&](NormRequest r) {
        const int blocks = 2 * 16 * groups;
        r.capabilities.residency = device(16 * groups, 9, true);
        r.room = blocks / 2;
        r.spare_room = spare * (blocks - r.room);
        const NormPlan p = plan_norm(r, cuda_layout(r.world, kDefaultPayloadBytes));
        const NormShape& s = p.shape;
        const uint64_t held = r.capabilities.residency.clusters(s.threads, s.cluster);
        const auto clusters = static_cast<uint64_t>(p.plan.blocks) / s.cluster;
        const bool push = pushes_into_slots(p.plan.algorithm);
        ASSERT_LE(clusters, std::max<uint64_t>(push && spare == 1 ? held : held / 2, 1));
      });
    }
  }
}

TEST(NormPlan, GridsStayWithinTheBlocksOfTheCommunicator) {
  for (const int room : {1, 2, 3, 4, 7, 16}) {
    for_each_request([&](NormRequest r) {
      r.room = room;
      r.spare_room = 0;
      const NormPlan p = plan_norm(r, cuda_layout(r.world, kDefaultPayloadBytes));
      ASSERT_LE(p.plan.blocks * p.plan.threads, room * kFullBlock)
          << r.rows << " x " << r.cols << " in room " << room;
    });
  }
}

TEST(NormPlan, ATunedGridIsTaken) {
  NormRequest r = request(64, 8192);
  r.tuned_threads = 256;
  const CudaLayout layout = cuda_layout(r.world, kDefaultPayloadBytes);
  for (const int blocks : {4, 16, 40}) {
    r.tuned_blocks = blocks;
    const NormPlan p = plan_norm(r, layout);
    EXPECT_EQ(p.plan.threads, 256);
    EXPECT_EQ(p.plan.blocks, std::min(blocks, 64) / static_cast<int>(p.shape.cluster) *
                                 static_cast<int>(p.shape.cluster));
  }
}

TEST(NormPlan, DevicesWithSmallerGroupsTakeSmallerClusters) {
  NormRequest r = request(1, 8192);
  r.capabilities.residency.held[3][3] = 0;  // none of eight blocks of 512 threads
  EXPECT_EQ(plan_norm(r, cuda_layout(r.world, kDefaultPayloadBytes)).shape.cluster, 4u);
}

/// The grids of the measurements in docs/internals/engineering-log.md: rows of 8192 on 132
/// multiprocessors.
TEST(NormPlan, RowsOfALargeModelFillTheDevice) {
  for (const int world : {2, 4}) {
    for (uint64_t rows = 1; rows <= 2048; ++rows) {
      NormRequest r = request(rows, 8192, world);
      const NormPlan p = plan_norm(r, cuda_layout(world, kDefaultPayloadBytes));
      const bool owned = row_of(p.plan.algorithm).stages == 2;
      ASSERT_EQ(owned, world > 2 && r.bytes > 512u << 10);
      const uint64_t todo = owned ? largest_part(rows, world) : rows;
      const uint32_t cluster = todo <= 8 ? 8 : todo <= 32 ? 4 : 2;
      ASSERT_EQ(p.shape.cluster, cluster);
      ASSERT_EQ(p.shape.threads, 1024 / cluster);
      ASSERT_EQ(p.shape.steps, 1u);
      ASSERT_EQ(static_cast<uint64_t>(p.plan.blocks), cluster * std::min<uint64_t>(todo, 132));
    }
  }
}

TEST(NormPlan, SumsPassWhereResultsAreTwiceTheBytes) {
  constexpr uint64_t kLarge = 1 << 24;
  NormOptions o;
  EXPECT_FALSE(passes_sums(o, {true, true, false}, DType::bfloat16, kLarge)) << "not rounded";
  o.rounding = Rounding::parity;
  EXPECT_TRUE(passes_sums(o, {true, true, false}, DType::bfloat16, kLarge));
  EXPECT_FALSE(passes_sums(o, {true, true, false}, DType::bfloat16, 1 << 20)) << "latency counts";
  EXPECT_FALSE(passes_sums(o, {true, false, true}, DType::bfloat16, kLarge)) << "half as much more";
}

TEST(NormPlan, PlanesDoNotOverlap) {
  NormShape s;
  s.threads = 128;
  const RowPlanes all(s.threads, true, true, 2);
  EXPECT_EQ(all.residual, 0u);
  EXPECT_EQ(all.normalized, 128u * 16);
  EXPECT_EQ(all.quantized, 2 * 128u * 16);
  EXPECT_EQ(all.scales, 2 * 128u * 16 + 128u * 8);
  const RowPlanes bytes(s.threads, false, false, 4);
  EXPECT_EQ(bytes.quantized, 0u);
  EXPECT_EQ(bytes.scales, 128u * 4);
}

TEST(NormScale, Float16RoundTrips) {
  for (uint32_t half = 0; half <= 0x7C00; ++half) {
    const float value = from_float16_bits(half);
    ASSERT_EQ(to_float16_bits(value), half) << value;
    if (half >= 0x7BFF) continue;
    // Ties go to the even value, all others to the nearest.
    const double next = from_float16_bits(half + 1), middle = (value + next) / 2;
    ASSERT_EQ(to_float16_bits(static_cast<float>(middle)), half + (half & 1));
    ASSERT_EQ(to_float16_bits(std::nextafter(static_cast<float>(middle), 0.0f)), half);
    ASSERT_EQ(to_float16_bits(std::nextafter(static_cast<float>(middle), 1e9f)), half + 1);
  }
  EXPECT_EQ(to_float16_bits(65519.0f), 0x7BFFu);
  EXPECT_EQ(to_float16_bits(65520.0f), 0x7C00u);
  EXPECT_EQ(to_float16_bits(1e30f), 0x7C00u);
}

/// Checks every code, the middle between two codes and its neighbors, and floats of all magnitudes.
template <Quantization To>
void expect_nearest_fp8() {
  const std::vector<double> values = cpu::code_values(To);
  std::vector<float> asked = {1e30f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()};
  for (size_t code = 0; code < values.size(); ++code) {
    asked.push_back(static_cast<float>(values[code]));
    if (code == 0) continue;
    const auto middle = static_cast<float>((values[code - 1] + values[code]) / 2);
    for (const float toward : {middle, 0.0f, 1e9f}) asked.push_back(std::nextafter(middle, toward));
  }
  for (uint64_t bits = 0; bits < 0x7F800000u; bits += 65521) {
    asked.push_back(float_of(static_cast<uint32_t>(bits)));
  }
  for (const float value : asked) {
    ASSERT_EQ(to_fp8_bits<To>(value), cpu::nearest_code(value, To)) << value;
    const float below = -value;
    ASSERT_EQ(to_fp8_bits<To>(below), cpu::nearest_code(below, To)) << below;
  }
}

TEST(NormScale, Fp8IsTheNearest) {
  expect_nearest_fp8<Quantization::e4m3fn>();
  expect_nearest_fp8<Quantization::e5m2>();
}

/// Checks divisors and values with random bits, and quotients of all moderate sizes. Moderate
/// quotients must have the same bits. The others must only have the same 8-bit result.
TEST(NormScale, DivisorsGiveTheQuotientsOfDivision) {
  std::mt19937_64 random(1);
  const auto bits = [&] { return static_cast<uint32_t>(random()); };
  for (int i = 0; i < 3'000'000; ++i) {
    const float divisor = float_of(bits());
    const int exponent = static_cast<int>(bits() % 60) - 30;
    const float value = i % 2 == 0
                            ? float_of(bits())
                            : std::ldexp(divisor * float_of(0x3F800000u | bits() >> 9), exponent);
    const float expected = value / divisor;
    const float found = Divisor(divisor).divide(value);
    ASSERT_EQ(is_nan(expected), is_nan(found)) << value << " / " << divisor;
    if (is_nan(expected)) continue;
    ASSERT_EQ(std::signbit(expected), std::signbit(found)) << value << " / " << divisor;
    const float size = std::abs(expected);
    if (size > 0x1p-30f && size < 0x1p30f) {
      ASSERT_EQ(expected, found) << value << " / " << divisor;
    } else {
      ASSERT_EQ(size < 1, std::abs(found) < 0x1p-29f) << value << " / " << divisor;
      ASSERT_EQ(size > 1, std::abs(found) > 0x1p29f) << value << " / " << divisor;
    }
  }
}

TEST(NormScale, PowersOfTwoAreNotBelow) {
  for (const float value : {1.0f, 1.5f, 2.0f, 3e-39f, 1e-45f, 0x1p-126f, 0x1.8p-127f, 3e38f}) {
    const float power = power_of_two_above(value);
    EXPECT_GE(power, value);
    if (std::isfinite(power)) {
      EXPECT_EQ(std::exp2(std::round(std::log2(static_cast<double>(power)))), power);
      EXPECT_LT(power / 2, value);
    }
  }
  EXPECT_EQ(power_of_two_above(0.0f), 0.0f);
  EXPECT_TRUE(std::isinf(power_of_two_above(std::numeric_limits<float>::infinity())));
}

TEST(NormScale, ExponentsHoldWhatTheyCan) {
  EXPECT_EQ(to_e8m0(1.0f), 127);
  EXPECT_EQ(from_e8m0(127), 1.0f);
  EXPECT_EQ(from_e8m0(0), 0x1p-127f);
  EXPECT_EQ(round_scale(0.0f, ScaleType::float8_e8m0fnu), 0x1p-127f);
  EXPECT_EQ(round_scale(0x1p-140f, ScaleType::float8_e8m0fnu), 0x1p-127f);
  EXPECT_TRUE(
      std::isnan(round_scale(std::numeric_limits<float>::infinity(), ScaleType::float8_e8m0fnu)));
  EXPECT_EQ(stored_scale(float_of(kNaNBits), ScaleType::float8_e8m0fnu), 255u);
}

TEST(NormScale, FollowsTheLargestResult) {
  NormOptions o;
  o.quantization = Quantization::e4m3fn;
  o.scale_ub = std::numeric_limits<float>::infinity();
  EXPECT_EQ(scale_of(bits_of(448.0f), o).scale, 1.0f);
  EXPECT_EQ(scale_of(bits_of(896.0f), o).inverse, 0.5f);
  EXPECT_EQ(scale_of(0, o).inverse, 0.0f);
  EXPECT_EQ(scale_of(1, o).inverse, 0.0f) << "its reciprocal is not finite";
  EXPECT_TRUE(std::isnan(scale_of(kNaNBits, o).scale));
  EXPECT_EQ(scale_of(kNaNBits, o).inverse, 0.0f);
  EXPECT_EQ(scale_of(kInfinityBits, o).inverse, 0.0f);
  o.scale_ub = 44.8f;
  EXPECT_EQ(scale_of(bits_of(448.0f), o).scale, 44.8f / 448.0f);
  EXPECT_TRUE(std::isnan(scale_of(kNaNBits, o).scale)) << "a bound does not hide NaN";
  o.scale_mode = ScaleMode::group;
  EXPECT_EQ(scale_of(0, o).scale, 1e-10f / 448.0f);
}

}  // namespace
}  // namespace collx
