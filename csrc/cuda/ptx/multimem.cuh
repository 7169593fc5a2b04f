// NVLink multicast by its PTX names: an address that stands for the same bytes of every rank's
// memory. A load returns the reduction of the ranks' values. A store and a reduction reach all
// ranks.
//
// NEVER RUN  No line of this file has run on hardware yet: docs/guide/multicast.md. Tests check
// only the assembler's output for it (tests/cpp/test_multimem.py). They run the kernels that use it
// with Simulated from transports/multicast.cuh instead.
//
// ALIASES  The same memory also has each rank's own address, which is used for other accesses.
// Accesses to the same location by different addresses need a proxy fence between them to be
// ordered, in addition to the usual ordering.
#pragma once

#include "../../protocol/types.h"
#include "memory.cuh"

namespace collx::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COLLX_MULTIMEM 1
#else
#define COLLX_MULTIMEM 0  // this code is never reached
#endif

/// 16 bytes in which each element is the sum over the ranks, in the order of the switch. Floats are
/// accumulated in float32 and rounded once. Integers have no 16-byte form.
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
    static_assert(D == DType::int64, "multicast cannot add other dtypes");
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

/// Stores the bits of any dtype unchanged: the type in the instruction only gives the width.
__device__ __forceinline__ void multimem_st(char* p, const Vector& v) {
#if COLLX_MULTIMEM
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#endif
}

/// With release: ordered after all earlier accesses.
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

/// Like multimem_red_release_add, for one rank.
__device__ __forceinline__ void red_release_add(char* p, uint64_t v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

}  // namespace collx::cuda::ptx
