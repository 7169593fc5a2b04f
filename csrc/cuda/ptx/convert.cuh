// Conversions between float32 and narrower floats by their PTX names, to nearest even. CUDA's
// headers for these types also provide them. But a machine that compiles an epilogue may lack those
// headers, and they would be most of the code that it compiles.
#pragma once

#include "../../protocol/norm.h"

namespace collx::cuda::ptx {

/// Two values in a word. The first one is in the low half.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t cvt_rn_f16x2(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

/// The value in the low half of a word.
__device__ __forceinline__ float cvt_f32_bf16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float cvt_f32_f16(uint32_t word) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(word)));
  return value;
}

/// Two bytes of fp8. The first one is the low byte. Values are clamped, and NaN of either sign
/// becomes 0x7F.
template <Quantization To>
__device__ __forceinline__ uint32_t cvt_rn_satfinite_fp8x2(float low, float high) {
  static_assert(To == Quantization::e4m3fn || To == Quantization::e5m2);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short pair;
  if constexpr (To == Quantization::e4m3fn) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return to_fp8_bits<To>(low) | to_fp8_bits<To>(high) << 8;
#endif
}

}  // namespace collx::cuda::ptx
