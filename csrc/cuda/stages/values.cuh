// Implements the statements of an epilogue (protocol/expression.h) for single values: f.add<T>(a,
// b) implements "add.T". This file is only compiled at run time, with --fmad=false, so that exact
// operations give the same bits as on every other device (docs/guide/epilogues.md).
#pragma once

#include "../../protocol/epilogue.h"
#include "reduce.cuh"

namespace collx::cuda::values {

namespace detail {
template <ValueType T>
constexpr auto kept_as() {
  if constexpr (T == ValueType::float64) return double{};
  if constexpr (T == ValueType::float32 || is_narrow(T)) return float{};
  if constexpr (T == ValueType::int64) return int64_t{};
  if constexpr (T == ValueType::int32) return int32_t{};
  if constexpr (T == ValueType::int16) return int16_t{};
  if constexpr (T == ValueType::int8) return int8_t{};
  if constexpr (T == ValueType::uint8) return uint8_t{};
  if constexpr (T == ValueType::boolean) return bool{};
}
}  // namespace detail

/// The type that holds a value.
template <ValueType T>
using Kept = decltype(detail::kept_as<T>());

template <ValueType T>
__device__ __forceinline__ Kept<T> constant(uint64_t bits) {
  if constexpr (T == ValueType::float64) return __longlong_as_double(static_cast<int64_t>(bits));
  if constexpr (T == ValueType::float32) return __uint_as_float(static_cast<uint32_t>(bits));
  return static_cast<Kept<T>>(bits);
}

template <ValueType T, typename From>
__device__ __forceinline__ Kept<T> cast(From x) {
  if constexpr (T == ValueType::boolean) {
    return x != From{0};
  } else if constexpr (T == ValueType::bfloat16) {
    return ptx::cvt_f32_bf16(ptx::cvt_rn_bf16x2(static_cast<float>(x), 0.0f));
  } else if constexpr (T == ValueType::float16) {
    return ptx::cvt_f32_f16(ptx::cvt_rn_f16x2(static_cast<float>(x), 0.0f));
  } else if constexpr (kIsFloat<From> && !kIsFloat<Kept<T>>) {
    // A value outside the range of int64 gives the smallest int64, as on the CPU.
    constexpr From kLimit = 9223372036854775808.0;
    const bool holds = x >= -kLimit && x < kLimit;
    return static_cast<Kept<T>>(holds ? static_cast<int64_t>(x) : -0x7FFFFFFFFFFFFFFF - 1);
  } else {
    return static_cast<Kept<T>>(x);
  }
}

template <ValueType T>
__device__ __forceinline__ Kept<T> add(Kept<T> a, Kept<T> b) {
  return cuda::detail::add(a, b);
}
template <ValueType T>
__device__ __forceinline__ Kept<T> sub(Kept<T> a, Kept<T> b) {
  return cuda::detail::wrapped(a, b, [](auto x, auto y) { return x - y; });
}
template <ValueType T>
__device__ __forceinline__ Kept<T> mul(Kept<T> a, Kept<T> b) {
  return cuda::detail::multiply(a, b);
}
template <ValueType T>
__device__ __forceinline__ Kept<T> div(Kept<T> a, Kept<T> b) {
  return a / b;
}
template <ValueType T>
__device__ __forceinline__ Kept<T> neg(Kept<T> a) {
  if constexpr (kIsFloat<Kept<T>>) return -a;
  return sub<T>(Kept<T>{0}, a);
}
template <ValueType T>
__device__ __forceinline__ Kept<T> abs(Kept<T> a) {
  if constexpr (T == ValueType::float32) return fabsf(a);
  if constexpr (T == ValueType::float64) return fabs(a);
  return a < Kept<T>{0} ? neg<T>(a) : a;
}

template <ValueType T>
__device__ __forceinline__ Kept<T> minimum(Kept<T> a, Kept<T> b) {
  return cuda::detail::smaller(a, b);
}
template <ValueType T>
__device__ __forceinline__ Kept<T> maximum(Kept<T> a, Kept<T> b) {
  return cuda::detail::larger(a, b);
}
template <ValueType T>
__device__ __forceinline__ Kept<T> clamp_min(Kept<T> a, Kept<T> least) {
  return maximum<T>(a, least);
}
template <ValueType T>
__device__ __forceinline__ Kept<T> clamp_max(Kept<T> a, Kept<T> most) {
  return minimum<T>(a, most);
}
template <ValueType T>
__device__ __forceinline__ Kept<T> relu(Kept<T> a) {
  return maximum<T>(a, Kept<T>{0});
}

/// Divides by a positive number and rounds toward minus infinity.
template <ValueType T>
__device__ __forceinline__ Kept<T> floor_divide(Kept<T> a, Kept<T> b) {
  return static_cast<Kept<T>>(a / b - (a % b < 0 ? 1 : 0));
}
template <ValueType T>
__device__ __forceinline__ Kept<T> remainder(Kept<T> a, Kept<T> b) {
  const auto rest = a % b;
  return static_cast<Kept<T>>(rest + (rest < 0 ? b : 0));
}

template <ValueType T>
__device__ __forceinline__ Kept<T> where(bool which, Kept<T> a, Kept<T> b) {
  return which ? a : b;
}

// These return bool, which is also the type that their statements name.
template <ValueType, typename V>
__device__ __forceinline__ bool lt(V a, V b) {
  return a < b;
}
template <ValueType, typename V>
__device__ __forceinline__ bool le(V a, V b) {
  return a <= b;
}
template <ValueType, typename V>
__device__ __forceinline__ bool gt(V a, V b) {
  return a > b;
}
template <ValueType, typename V>
__device__ __forceinline__ bool ge(V a, V b) {
  return a >= b;
}
template <ValueType, typename V>
__device__ __forceinline__ bool eq(V a, V b) {
  return a == b;
}
template <ValueType, typename V>
__device__ __forceinline__ bool ne(V a, V b) {
  return a != b;
}
template <ValueType>
__device__ __forceinline__ bool land(bool a, bool b) {
  return a && b;
}
template <ValueType>
__device__ __forceinline__ bool lor(bool a, bool b) {
  return a || b;
}
template <ValueType>
__device__ __forceinline__ bool lxor(bool a, bool b) {
  return a != b;
}
template <ValueType>
__device__ __forceinline__ bool lnot(bool a) {
  return !a;
}

// For float32 and float64, these are CUDA's own functions. The CUDA programming guide lists their
// errors.
#define COLLX_REAL(NAME, OF_FLOAT, OF_DOUBLE)                   \
  template <ValueType T>                                        \
  __device__ __forceinline__ Kept<T> NAME(Kept<T> x) {          \
    if constexpr (T == ValueType::float32) return OF_FLOAT(x);  \
    if constexpr (T == ValueType::float64) return OF_DOUBLE(x); \
  }
COLLX_REAL(sqrt, __fsqrt_rn, __dsqrt_rn)
COLLX_REAL(rsqrt, rsqrtf, ::rsqrt)
COLLX_REAL(exp, expf, ::exp)
COLLX_REAL(log, logf, ::log)
COLLX_REAL(tanh, tanhf, ::tanh)
COLLX_REAL(erf, erff, ::erf)
#undef COLLX_REAL

/// Numerically stable for both signs of x: the argument of exp is never positive.
template <ValueType T>
__device__ __forceinline__ Kept<T> sigmoid(Kept<T> x) {
  using V = Kept<T>;
  const V e = exp<T>(-abs<T>(x));
  return (x < V{0} ? e : V{1}) / (V{1} + e);
}
/// Far below zero, sigmoid(x) is below the smallest normal number although x * sigmoid(x) is not.
/// The product is therefore computed in two steps.
template <ValueType T>
__device__ __forceinline__ Kept<T> silu(Kept<T> x) {
  using V = Kept<T>;
  if (x > V{-64}) return x * sigmoid<T>(x);
  const V root = exp<T>(static_cast<V>(0.5) * x);
  return x * root * root;
}
template <ValueType T>
__device__ __forceinline__ Kept<T> gelu(Kept<T> x) {
  using V = Kept<T>;
  return static_cast<V>(0.5) * x * (V{1} + erf<T>(x * static_cast<V>(0.70710678118654752440)));
}
template <ValueType T>
__device__ __forceinline__ Kept<T> gelu_tanh(Kept<T> x) {
  using V = Kept<T>;
  constexpr V kScale = 0.79788456080286535588, kCubic = 0.044715;  // sqrt(2 / pi)
  return static_cast<V>(0.5) * x * (V{1} + tanh<T>(kScale * (x + kCubic * x * x * x)));
}

}  // namespace collx::cuda::values
