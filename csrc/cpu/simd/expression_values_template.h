// The types of the values in expressions, and functions on them. Part of the templates that are
// compiled once for each level of vector instructions: see reduce_template.h.

#include "formats_template.h"

namespace collx::cpu::COLLX_SIMD_LEVEL {

/// The type that holds a value: float for 16-bit floats. They are in the order of ValueType.
using LaneTypes =
    std::tuple<float, float, float, double, int32_t, int64_t, int8_t, uint8_t, int16_t, bool>;
static_assert(std::tuple_size_v<LaneTypes> == static_cast<size_t>(ValueType::count));
template <ValueType T>
using Lane = std::tuple_element_t<static_cast<size_t>(T), LaneTypes>;

/// The type in memory.
template <ValueType T>
using Stored = std::conditional_t<is_narrow(T), uint16_t, Lane<T>>;

/// Converts 16-bit floats from their bits and to them, to nearest even. It has no branches, so that
/// loops are vectorized.
template <ValueType T>
float widened(uint16_t stored) {
  const uint32_t half = stored;
  if constexpr (T == ValueType::bfloat16) return std::bit_cast<float>(half << 16);
  const uint32_t magnitude = half & 0x7fffu, shifted = magnitude << 13;
  // A subnormal is its mantissa times 2^-24, exact in float32.
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t special = (shifted + (224u << 23)) | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  const uint32_t finite =
      magnitude < 0x0400u ? std::bit_cast<uint32_t>(small) : shifted + (112u << 23);
  return std::bit_cast<float>((magnitude >= 0x7c00u ? special : finite) | (half & 0x8000u) << 16);
}
template <ValueType T>
uint16_t narrowed(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  const bool nan = magnitude > 0x7f800000u;
  if constexpr (T == ValueType::bfloat16) {
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
  }
  // Above the largest half, the carry of the rounding gives infinity up to 65536, which is the
  // limit here.
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Adding 0.5, whose last bit is 2^-24, rounds to the grid of subnormal halves.
  const uint32_t small =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t bounded = magnitude >= 0x47800000u ? 0x7c00u : finite;
  return static_cast<uint16_t>(nan ? 0x7e00u : bounded | sign);
}

template <ValueType T>
Lane<T> loaded(Stored<T> stored) {
  if constexpr (is_narrow(T)) {
    return widened<T>(stored);
  } else {
    return stored;
  }
}
template <ValueType T>
Stored<T> stored(Lane<T> value) {
  if constexpr (is_narrow(T)) {
    return narrowed<T>(value);
  } else {
    return value;
  }
}

/// Calls f with the type as a constant.
template <typename F>
void with_type(ValueType type, F f) {
  using enum ValueType;
  switch (type) {
    case float32: return f(std::integral_constant<ValueType, float32>{});
    case float16: return f(std::integral_constant<ValueType, float16>{});
    case bfloat16: return f(std::integral_constant<ValueType, bfloat16>{});
    case float64: return f(std::integral_constant<ValueType, float64>{});
    case int32: return f(std::integral_constant<ValueType, int32>{});
    case int64: return f(std::integral_constant<ValueType, int64>{});
    case int8: return f(std::integral_constant<ValueType, int8>{});
    case uint8: return f(std::integral_constant<ValueType, uint8>{});
    case int16: return f(std::integral_constant<ValueType, int16>{});
    case boolean: return f(std::integral_constant<ValueType, boolean>{});
    case count: break;
  }
}

/// The functions below take one value or a vector of floats.
template <typename V>
inline constexpr bool kIsWhole = std::is_integral_v<V>;

/// Integers wrap. Signed overflow is undefined in C++, so the operation uses unsigned integers.
template <typename V, typename F>
V wrapped(V a, V b, F f) {
  if constexpr (kIsWhole<V>) {
    return static_cast<V>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  } else {
    return f(a, b);
  }
}

template <typename V>
struct PatternOf {
  using Type = std::conditional_t<sizeof(V) == 4, uint32_t, uint64_t>;
};
template <>
struct PatternOf<Floats> {
  using Type = Bits32;
};

/// Applies f to the bits.
template <typename V, typename F, typename... Vs>
V by_bits(F f, const V& a, const Vs&... others) {
  using Pattern = typename PatternOf<V>::Type;
  return bits<V>(f(bits<Pattern>(a), bits<Pattern>(others)...));
}

/// For two numbers that are not zeros. If the first one is NaN, the result is NaN.
template <typename V>
V lesser(V a, V b) {
  return b < a ? b : a;
}
template <typename V>
V greater(V a, V b) {
  return a < b ? b : a;
}

/// For any two values, without a branch. Equal floats, which may be zeros of both signs, are
/// combined by their bits.
template <typename V, typename F>
V extreme(V a, V b, V of_numbers, F of_equal) {
  if constexpr (kIsWhole<V>) {
    return of_numbers;
  } else {
    const V number = a == b ? by_bits(of_equal, a, b) : of_numbers;
    return b != b ? b : number;
  }
}
template <typename V>
V least(V a, V b) {
  return extreme(a, b, lesser(a, b), [](auto x, auto y) { return x | y; });
}
template <typename V>
V most(V a, V b) {
  return extreme(a, b, greater(a, b), [](auto x, auto y) { return x & y; });
}
template <typename V>
V magnitude(V a) {
  if constexpr (kIsWhole<V>) {
    return a < V{} ? wrapped(V{}, a, [](auto zero, auto x) { return zero - x; }) : a;
  } else {
    return by_bits([](auto x) { return x << 1 >> 1; }, a);
  }
}

/// Calls g with the function of an op on two numbers. The op may ignore the second number.
/// `ordinary`: the second number is neither NaN nor zero.
template <typename G>
inline __attribute__((always_inline)) void with_function(Do what, bool ordinary, G g) {
  const auto wrapping = [&](auto f) { g([f](auto a, auto b) { return wrapped(a, b, f); }); };
  switch (what) {
    case Do::add: return wrapping([](auto a, auto b) { return a + b; });
    case Do::sub: return wrapping([](auto a, auto b) { return a - b; });
    case Do::mul: return wrapping([](auto a, auto b) { return a * b; });
    case Do::div:
      return g([](auto a, auto b) {
        if constexpr (kIsWhole<decltype(a)>) {
          return a;  // there is no division of integers
        } else {
          return a / b;
        }
      });
    case Do::neg: return wrapping([](auto a, auto) { return -a; });
    case Do::abs: return g([](auto a, auto) { return magnitude(a); });
    case Do::minimum:
    case Do::clamp_max:
      if (ordinary) return g([](auto a, auto b) { return lesser(a, b); });
      return g([](auto a, auto b) { return least(a, b); });
    case Do::maximum:
    case Do::clamp_min:
      if (ordinary) return g([](auto a, auto b) { return greater(a, b); });
      return g([](auto a, auto b) { return most(a, b); });
    case Do::relu:
      return g([](auto a, auto) { return a <= decltype(a){} ? decltype(a){} : a; });  // keeps NaN
    default: return;
  }
}

template <typename To, ValueType Type, typename From>
To converted(From x) {
  if constexpr (Type == ValueType::boolean) {
    return x != From{0};
  } else if constexpr (is_narrow(Type)) {
    return widened<Type>(narrowed<Type>(static_cast<float>(x)));
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    // A value outside the range of int64 is undefined in PyTorch, too. Here it gives the smallest
    // int64.
    constexpr From kLimit = 9223372036854775808.0;
    const bool holds = x >= -kLimit && x < kLimit;
    return static_cast<To>(holds ? static_cast<int64_t>(x) : INT64_MIN);
  } else {
    return static_cast<To>(x);
  }
}

/// e^x, within 2 units in the last place of double. It only uses operations that can be vectorized.
inline __attribute__((always_inline)) double exponential(double x) {
  constexpr double kMagic = 0x1.8p52;  // this addition puts the nearest integer into the low bits
  constexpr double kHigh = 0x1.62e42fefa0000p-1, kLow = 0x1.cf79abc9e3b3ap-40;  // of ln 2
  x = x > 710.0 ? 710.0 : x;                                                    // NaN stays NaN
  x = x < -750.0 ? -750.0 : x;
  const double shifted = x * 0x1.71547652b82fep0 + kMagic, n = shifted - kMagic;
  const double r = (x - n * kHigh) - n * kLow;
  double p = 1.0 / 6227020800.0;  // Taylor series, |r| <= ln 2 / 2
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // 2^n in two steps, since n may exceed the range of one exponent.
  const uint64_t bits = std::bit_cast<uint64_t>(shifted);
  const auto whole = static_cast<int64_t>(bits << 32) >> 32;
  const int64_t half = whole >> 1;
  const auto power = [](int64_t k) {
    return std::bit_cast<double>(static_cast<uint64_t>(k + 1023) << 52);
  };
  return p * power(half) * power(whole - half);
}

inline __attribute__((always_inline)) double logistic(double x) {
  const double e = exponential(-std::abs(x));
  return (x < 0 ? e : 1.0) / (1.0 + e);
}

/// sinh(x) / cosh(x) to float's precision.
inline __attribute__((always_inline)) double hyperbolic_tangent(double x) {
  const double e = exponential(-2.0 * std::abs(x)), squared = x * x;
  const double large = (1.0 - e) / (1.0 + e);
  const double small = 1.0 + squared * (-1.0 / 3.0 + squared * (2.0 / 15.0));  // over x
  const double near = x * small, far = x < 0 ? -large : large;
  return std::abs(x) < 0.01 ? near : far;
}

/// Functions of a real number, in double.
inline double real_function(Do what, double x) {
  using std::numbers::sqrt2;
  switch (what) {
    case Do::exp: return std::exp(x);
    case Do::log: return std::log(x);
    case Do::tanh: return std::tanh(x);
    case Do::sigmoid:
    case Do::silu: {
      // Numerically stable for both signs of x: the argument of exp is never positive.
      const double e = std::exp(-std::abs(x));
      const double sigmoid = (x < 0 ? e : 1.0) / (1.0 + e);
      return what == Do::silu ? x * sigmoid : sigmoid;
    }
    case Do::erf: return std::erf(x);
    case Do::gelu: return 0.5 * x * std::erfc(-x / sqrt2);
    case Do::gelu_tanh: {
      const double scale = sqrt2 * std::numbers::inv_sqrtpi;
      return 0.5 * x * (1.0 + std::tanh(scale * (x + 0.044715 * x * x * x)));
    }
    default: return x;
  }
}

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
