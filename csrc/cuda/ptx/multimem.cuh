// NVLink multicast by its PTX names: an address that stands for the same bytes of every rank's
// memory. A load gives what the ranks have there, reduced on the way; a store and a reduction reach
// all of them.
//
// NEVER RUN  No line of this file has run on hardware yet: docs/guide/multicast.md. What other
// tests see is what the assembler makes of it (tests/cpp/test_multimem.py), and the kernels around
// it with transports/multicast.cuh's Simulated in its place.
//
// ALIASES  The same memory also has each rank's own address, by which it is read and written
// besides. Accesses by different addresses of one place are ordered where a proxy fence stands on
// the way from the one to the other, in addition to what orders them otherwise.
#pragma once

#include "../../protocol/types.h"
#include "memory.cuh"

namespace collx::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COLLX_MULTIMEM 1
#else
#define COLLX_MULTIMEM 0  // nothing here is reached
#endif

/// 16 bytes of which each element is the sum over the ranks, in the switch's order: of floats in
/// float32, rounded once. Integers have no form of 16 bytes.
template <DType D>
__device__ __forceinline__ Vector multimem_ld_reduce_add(const char* p) {
  Vector v{};
#if COLLX_MULTIMEM
  if constexpr (D == DType::float32) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(p)
                 : "memory");
  } else if constexpr (D == DType::float16) {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
        : "l"(p)
        : "memory");
  } else if constexpr (D == DType::bfloat16) {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
        : "l"(p)
        : "memory");
  } else if constexpr (D == DType::int32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%1];"
                   : "=r"(v.word[i])
                   : "l"(p + 4 * i)
                   : "memory");
    }
  } else {
    static_assert(D == DType::int64, "multicast adds up no other dtype");
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint64_t element;
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u64 %0, [%1];"
                   : "=l"(element)
                   : "l"(p + 8 * i)
                   : "memory");
      v.word[2 * i] = static_cast<uint32_t>(element);
      v.word[2 * i + 1] = static_cast<uint32_t>(element >> 32);
    }
  }
#endif
  return v;
}

/// Bit for bit, whatever they are of: the type gives the width alone.
__device__ __forceinline__ void multimem_st(char* p, const Vector& v) {
#if COLLX_MULTIMEM
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#endif
}

/// Behind everything before it.
__device__ __forceinline__ void multimem_red_release_add(char* p, uint64_t v) {
#if COLLX_MULTIMEM
  asm volatile("multimem.red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#endif
}

__device__ __forceinline__ void fence_proxy_alias() {
#if COLLX_MULTIMEM
  asm volatile("fence.proxy.alias;" ::: "memory");
#endif
}

/// The same as multimem_red_release_add at one rank.
__device__ __forceinline__ void red_release_add(char* p, uint64_t v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

}  // namespace collx::cuda::ptx
