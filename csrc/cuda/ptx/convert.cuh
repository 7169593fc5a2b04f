// Conversions between float32 and the 16-bit floats by their PTX names, to nearest even. CUDA's
// headers for these types have them, too, but a machine that compiles an epilogue need not have
// those headers, and they would be most of what it compiles.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda::ptx {

/// Two values in a word, the first in its low half.
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

}  // namespace collx::cuda::ptx
