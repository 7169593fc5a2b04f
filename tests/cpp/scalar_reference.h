// A second implementation of the numeric contract, one element at a time. Unlike the kernels, it
// converts with exact arithmetic in double instead of bit operations.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "protocol/names.h"
#include "protocol/types.h"

namespace collx::cpu {

using Bytes = std::vector<char>;

inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max, ReduceOp::min,
                                    ReduceOp::prod};

/// Returns the value nearest to x with `digits` binary digits and an exponent of at least `least`.
/// Ties go to even.
inline double round_to_grid(double x, int digits, int least) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int ulp = std::max(std::ilogb(x), least) - (digits - 1);
  return std::ldexp(std::nearbyint(std::ldexp(x, -ulp)), ulp);
}

struct HalfTraits {
  static float widen(uint16_t h) {
    const int exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff;
    const float sign = (h & 0x8000) != 0 ? -1.0f : 1.0f;
    if (exponent == 31) {
      return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                           : sign * std::numeric_limits<float>::infinity();
    }
    return sign * (exponent == 0 ? std::ldexp(float(mantissa), -24)
                                 : std::ldexp(float(1024 + mantissa), exponent - 25));
  }
  static uint16_t narrow(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return sign | 0x7e00;
    const double value = std::fabs(round_to_grid(x, 11, -14));
    if (value >= 65536.0) return sign | 0x7c00;
    if (value < std::ldexp(1.0, -14)) return sign | uint16_t(std::ldexp(value, 24));
    const int exponent = std::ilogb(value);
    return sign | uint16_t(((exponent + 15) << 10) + int(std::ldexp(value, 10 - exponent)) - 1024);
  }
};

struct BFloatTraits {
  static float widen(uint16_t b) { return std::bit_cast<float>(uint32_t(b) << 16); }
  static uint16_t narrow(float x) {
    if (std::isnan(x)) return 0x7fc0;
    // The conversion of values above the largest float results in infinity, like the rounding.
    return uint16_t(std::bit_cast<uint32_t>(float(round_to_grid(x, 8, -126))) >> 16);
  }
};

template <typename T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::max || op == ReduceOp::min) {
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      if (a == b) return std::signbit(a) == (op == ReduceOp::max) ? b : a;
    }
  }
  switch (op) {
    case ReduceOp::max: return a > b ? a : b;
    case ReduceOp::min: return a < b ? a : b;
    case ReduceOp::prod:
      if constexpr (std::is_integral_v<T>) return T(uint64_t(a) * uint64_t(b));
      return a * b;
    default:
      if constexpr (std::is_integral_v<T>) return T(uint64_t(a) + uint64_t(b));
      return a + b;
  }
}

template <typename Stored, typename Widen, typename Narrow>
void reduce_as(const std::vector<const void*>& inputs, void* output, uint64_t numel, ReduceOp op,
               Widen widen, Narrow narrow) {
  for (uint64_t i = 0; i < numel; ++i) {
    const auto value = [&](size_t rank) {
      return widen(static_cast<const Stored*>(inputs[rank])[i]);
    };
    auto acc = value(0);
    for (size_t r = 1; r < inputs.size(); ++r) acc = combine(op, acc, value(r));
    if constexpr (std::is_floating_point_v<decltype(acc)>) {
      if (op == ReduceOp::avg) acc = acc / static_cast<decltype(acc)>(inputs.size());
    }
    static_cast<Stored*>(output)[i] = narrow(acc);
  }
}

template <typename T>
void reduce_plain(const std::vector<const void*>& inputs, void* output, uint64_t numel,
                  ReduceOp op) {
  const auto same = [](T x) { return x; };
  reduce_as<T>(inputs, output, numel, op, same, same);
}

/// The inputs and the output are aligned to elements.
inline void reference_reduce(const std::vector<const void*>& inputs, void* output, uint64_t numel,
                             DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float32: return reduce_plain<float>(inputs, output, numel, op);
    case DType::float64: return reduce_plain<double>(inputs, output, numel, op);
    case DType::float16:
      return reduce_as<uint16_t>(inputs, output, numel, op, HalfTraits::widen, HalfTraits::narrow);
    case DType::bfloat16:
      return reduce_as<uint16_t>(inputs, output, numel, op, BFloatTraits::widen,
                                 BFloatTraits::narrow);
    case DType::int32: return reduce_plain<int32_t>(inputs, output, numel, op);
    case DType::int64: return reduce_plain<int64_t>(inputs, output, numel, op);
    case DType::int8: return reduce_plain<int8_t>(inputs, output, numel, op);
    default: return reduce_plain<uint8_t>(inputs, output, numel, op);
  }
}

/// Returns the bits of element i, with one pattern for every NaN.
inline uint64_t comparable_bits(const void* data, uint64_t i, DType dtype) {
  const size_t size = static_cast<size_t>(dtype_size(dtype));
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(data) + i * size, size);
  const uint64_t magnitude = bits & (~0ull >> (65 - 8 * size));
  const uint64_t infinity = dtype == DType::float16    ? 0x7c00
                            : dtype == DType::bfloat16 ? 0x7f80
                            : dtype == DType::float32  ? 0x7f800000
                                                       : 0x7ff0000000000000;
  return has_sentinel(dtype) && magnitude > infinity ? ~0ull : bits;
}

/// Describes the first difference of two arrays. Returns "" if they are equal.
inline std::string first_difference(const void* got, const void* expected, uint64_t numel,
                                    DType dtype) {
  for (uint64_t i = 0; i < numel; ++i) {
    const uint64_t a = comparable_bits(got, i, dtype), b = comparable_bits(expected, i, dtype);
    if (a == b) continue;
    char text[96];
    std::snprintf(text, sizeof text, "element %llu is %llx, not %llx",
                  static_cast<unsigned long long>(i), static_cast<unsigned long long>(a),
                  static_cast<unsigned long long>(b));
    return text;
  }
  return "";
}

}  // namespace collx::cpu
