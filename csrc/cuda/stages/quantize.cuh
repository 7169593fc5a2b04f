// Conversions of single values: to the dtype and back, and to bytes.
#pragma once

#include <cuda_fp8.h>

#include "../../protocol/norm.h"
#include "reduce.cuh"

namespace collx::cuda {

/// The larger of two magnitudes, NaN when one is NaN.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
#else
  return float_of(max(magnitude(a), magnitude(b)));
#endif
}

/// To the dtype, to nearest even, and back.
template <DType D>
__device__ __forceinline__ float rounded(float value) {
  if constexpr (D == DType::bfloat16) return __bfloat162float(__float2bfloat16_rn(value));
  if constexpr (D == DType::float16) return __half2float(__float2half_rn(value));
  return value;
}

namespace detail {

/// Two bytes of fp8, whose NaN is 0x7F here, whatever its sign.
__device__ __forceinline__ uint32_t fp8_pair(float low, float high, __nv_fp8_interpretation_t to,
                                             float limit) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, to);  // and no more
#else
  uint32_t pair = __nv_cvt_float2_to_fp8x2(make_float2(clamp(low, limit), clamp(high, limit)),
                                           __NV_SATFINITE, to);
  if (is_nan(low)) pair = (pair & 0xFF00u) | 0x7Fu;
  if (is_nan(high)) pair = (pair & 0x00FFu) | 0x7F00u;
  return pair;
#endif
}

template <int N>
__device__ __forceinline__ Vector fp8_bytes(const float (&value)[N], __nv_fp8_interpretation_t to,
                                            float limit) {
  Vector bytes{};
#pragma unroll
  for (int e = 0; e < N; e += 2) {
    bytes.word[e / 4] |= fp8_pair(value[e], value[e + 1], to, limit) << e % 4 * 8;
  }
  return bytes;
}

}  // namespace detail

/// A byte for each value, in the first words: clamped, to nearest even. NaN becomes 0x7F in fp8 and
/// 0 in int8.
template <int N>
__device__ __forceinline__ Vector quantized_bytes(const float (&value)[N], Quantization q) {
  const float limit = largest_value(q);
  if (__builtin_expect(q == Quantization::e4m3fn, 1)) {
    return detail::fp8_bytes(value, __NV_E4M3, limit);
  }
  if (q == Quantization::e5m2) return detail::fp8_bytes(value, __NV_E5M2, limit);
  Vector bytes{};
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int rounded = __float2int_rn(clamp(value[e], limit));  // 0 of NaN
    bytes.word[e / 4] |= (static_cast<uint32_t>(rounded) & 0xFFu) << e % 4 * 8;
  }
  return bytes;
}

/// The words of quantized bytes on their way, and back: never all ones, since fp8 has no 0xFF here
/// and int8, which has no -128, travels with its lower bits turned over.
__device__ __forceinline__ Vector disguised(Vector v, Quantization q) {
  const uint32_t turned = q == Quantization::int8 ? 0x7F7F7F7Fu : 0;
  return {{v.word[0] ^ turned, v.word[1] ^ turned}};
}

}  // namespace collx::cuda
