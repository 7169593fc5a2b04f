// Conversions of single values: rounding to the dtype, and quantization to bytes.
#pragma once

#include "../ptx/convert.cuh"
#include "reduce.cuh"

namespace collx::cuda {

/// The larger of two magnitudes; NaN if either is NaN.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  return detail::larger(fabsf(a), fabsf(b));
}

/// Rounds to the dtype, to nearest even, and converts back.
template <DType D>
__device__ __forceinline__ float rounded(float value) {
  if constexpr (D == DType::bfloat16) return ptx::cvt_f32_bf16(ptx::cvt_rn_bf16x2(value, 0.0f));
  if constexpr (D == DType::float16) return ptx::cvt_f32_f16(ptx::cvt_rn_f16x2(value, 0.0f));
  return value;
}

namespace detail {

template <Quantization To, int N>
__device__ __forceinline__ Vector fp8_bytes(const float (&value)[N]) {
  Vector bytes{};
#pragma unroll
  for (int e = 0; e < N; e += 2) {
    const uint32_t pair = ptx::cvt_rn_satfinite_fp8x2<To>(value[e], value[e + 1]);
    bytes.word[e / 4] |= pair << e % 4 * 8;
  }
  return bytes;
}

}  // namespace detail

/// Quantizes each value to a byte, in the first words of the result. Values are clamped and rounded
/// to nearest even. NaN becomes 0x7F in fp8 and 0 in int8.
template <int N>
__device__ __forceinline__ Vector quantized_bytes(const float (&value)[N], Quantization q) {
  if (__builtin_expect(q == Quantization::e4m3fn, 1)) {
    return detail::fp8_bytes<Quantization::e4m3fn>(value);
  }
  if (q == Quantization::e5m2) return detail::fp8_bytes<Quantization::e5m2>(value);
  const float limit = largest_value(q);
  Vector bytes{};
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int rounded = __float2int_rn(clamp(value[e], limit));  // 0 for NaN
    bytes.word[e / 4] |= (static_cast<uint32_t>(rounded) & 0xFFu) << e % 4 * 8;
  }
  return bytes;
}

}  // namespace collx::cuda
