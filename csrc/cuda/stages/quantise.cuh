// Conversions of single values: to the dtype and back, and to bytes.
#pragma once

#include <cuda_fp8.h>

#include "../../protocol/norm.h"
#include "reduce.cuh"

namespace collx::cuda {

/// To the dtype, to nearest even, and back.
template <DType D>
__device__ __forceinline__ float rounded(float value) {
  if constexpr (D == DType::bfloat16) return __bfloat162float(__float2bfloat16_rn(value));
  if constexpr (D == DType::float16) return __half2float(__float2half_rn(value));
  return value;
}

namespace detail {

/// Two bytes of fp8, whose NaN is 0x7F here, whatever its sign.
__device__ __forceinline__ uint32_t fp8_pair(float low, float high, __nv_fp8_interpretation_t to) {
  uint32_t pair = __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, to);
  if (is_nan(low)) pair = (pair & 0xFF00u) | 0x7Fu;
  if (is_nan(high)) pair = (pair & 0x00FFu) | 0x7F00u;
  return pair;
}

}  // namespace detail

/// A byte for each value, in the first words: clamped, to nearest even. NaN becomes 0x7F in fp8 and
/// 0 in int8.
template <int N>
__device__ __forceinline__ Vector quantised_bytes(const float (&value)[N], Quantisation q) {
  Vector bytes{};
  float v[N];
  const float limit = largest_value(q);
#pragma unroll
  for (int e = 0; e < N; ++e) v[e] = clamp(value[e], limit);
  if (q == Quantisation::int8) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      bytes.word[e / 4] |= (static_cast<uint32_t>(__float2int_rn(v[e])) & 0xFFu) << e % 4 * 8;
    }
    return bytes;
  }
  const auto fp8 = q == Quantisation::e4m3fn ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
  for (int e = 0; e < N; e += 2) {
    bytes.word[e / 4] |= detail::fp8_pair(v[e], v[e + 1], fp8) << e % 4 * 8;
  }
  return bytes;
}

/// The words of quantised bytes on their way, and back: never all ones, since fp8 has no 0xFF here
/// and int8, which has no -128, travels with its lower bits turned over.
__device__ __forceinline__ Vector disguised(Vector v, Quantisation q) {
  const uint32_t turned = q == Quantisation::int8 ? 0x7F7F7F7Fu : 0;
  return {{v.word[0] ^ turned, v.word[1] ^ turned}};
}

}  // namespace collx::cuda
