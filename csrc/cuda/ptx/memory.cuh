// Loads, stores and fences by their PTX names. All accesses to memory that another GPU writes or
// reads use these functions. The name of each states its memory order and scope.
//
// PTX treats a vector access as separate accesses of its elements, in any order. Therefore a reader
// must check every element before it uses any: 32-bit elements for 8- to 32-bit types, 64-bit
// elements if a word is 64 bits wide.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda {

/// 16 bytes in registers: the unit that a thread moves.
struct alignas(16) Vector {
  uint32_t word[4];
};

/// Conversion from and to two 64-bit values.
__device__ __forceinline__ Vector vector_of(uint64_t low, uint64_t high) {
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
           static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
}
__device__ __forceinline__ uint64_t half_of(const Vector& v, int h) {
  return v.word[2 * h] | static_cast<uint64_t>(v.word[2 * h + 1]) << 32;
}

namespace ptx {

// For one value: "b32" in an "r" register, or "b64" in an "l" register.
#define COLLX_LOAD(NAME, PTX, T, REGISTER)                                \
  __device__ __forceinline__ T NAME(const T* p) {                         \
    T v;                                                                  \
    asm volatile(PTX " %0, [%1];" : "=" REGISTER(v) : "l"(p) : "memory"); \
    return v;                                                             \
  }
#define COLLX_STORE(NAME, PTX, T, REGISTER)                          \
  __device__ __forceinline__ void NAME(T* p, T v) {                  \
    asm volatile(PTX " [%0], %1;" ::"l"(p), REGISTER(v) : "memory"); \
  }
// For four consecutive words.
#define COLLX_LOAD_VECTOR(NAME, PTX)                                                  \
  __device__ __forceinline__ Vector NAME(const Vector* p) {                           \
    Vector v;                                                                         \
    asm volatile(PTX ".v4.b32 {%0, %1, %2, %3}, [%4];"                                \
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) \
                 : "l"(p)                                                             \
                 : "memory");                                                         \
    return v;                                                                         \
  }

// Weak loads, like those of the compiler, but issued where they are written. Otherwise the compiler
// would move them past a branch that waits for another load, which adds a memory latency for each
// of them.
COLLX_LOAD_VECTOR(ld_here, "ld.global")
COLLX_LOAD(ld_here, "ld.global.b32", uint32_t, "r")

COLLX_LOAD_VECTOR(ld_relaxed_sys, "ld.relaxed.sys.global")
COLLX_LOAD(ld_relaxed_sys, "ld.relaxed.sys.global.b32", uint32_t, "r")
COLLX_LOAD(ld_relaxed_sys, "ld.relaxed.sys.global.b64", uint64_t, "l")
COLLX_LOAD(ld_relaxed_gpu, "ld.relaxed.gpu.global.b32", uint32_t, "r")
COLLX_STORE(st_relaxed_sys, "st.relaxed.sys.global.b32", uint32_t, "r")
COLLX_STORE(st_relaxed_sys, "st.relaxed.sys.global.b64", uint64_t, "l")

COLLX_LOAD_VECTOR(ld_acquire_sys, "ld.acquire.sys.global")  // each word is a separate acquire
COLLX_LOAD(ld_acquire_sys, "ld.acquire.sys.global.b32", uint32_t, "r")
COLLX_LOAD(ld_acquire_sys, "ld.acquire.sys.global.b64", uint64_t, "l")
COLLX_STORE(st_release_sys, "st.release.sys.global.b32", uint32_t, "r")
COLLX_STORE(st_release_sys, "st.release.sys.global.b64", uint64_t, "l")

// Additions that do not return a result, so that nothing waits for it.
COLLX_STORE(red_add, "red.relaxed.gpu.global.add.u32", uint32_t, "r")
COLLX_STORE(red_add, "red.relaxed.gpu.global.add.u64", uint64_t, "l")
#undef COLLX_LOAD
#undef COLLX_STORE
#undef COLLX_LOAD_VECTOR

__device__ __forceinline__ void st_relaxed_sys(Vector* p, Vector v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

/// The same in two 64-bit elements. Each element arrives as a whole.
__device__ __forceinline__ Vector ld_relaxed_sys_b64(const Vector* p) {
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(p)
               : "memory");
  return vector_of(low, high);
}

__device__ __forceinline__ void st_relaxed_sys_b64(Vector* p, Vector v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(half_of(v, 0)),
               "l"(half_of(v, 1))
               : "memory");
}

__device__ __forceinline__ uint2 ld_relaxed_sys(const uint2* p) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed_sys(uint2* p, uint2 v) {
  asm volatile("st.relaxed.sys.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
               : "memory");
}

/// A word in shared memory, for synchronization between the threads of a block.
__device__ __forceinline__ void st_release_cta(uint32_t* shared, uint32_t v) {
  asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "r"(v)
               : "memory");
}
__device__ __forceinline__ uint32_t ld_acquire_cta(const uint32_t* shared) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];"
               : "=r"(v)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared)))
               : "memory");
  return v;
}

/// A vector in shared memory, by its shared-memory address.
__device__ __forceinline__ Vector ld_shared(uint32_t shared) {
  Vector v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(shared)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_shared(uint32_t shared, Vector v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

/// Keeps an address in registers, so that a polling loop does not recompute it in each iteration.
template <typename T>
__device__ __forceinline__ T* keep(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

/// The same for an offset. Values derived from it are computed where they are used.
__device__ __forceinline__ uint32_t keep(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

/// Reads a value only to load its cache line.
__device__ __forceinline__ void touch(uint32_t v) { asm volatile("" ::"r"(v)); }
__device__ __forceinline__ void touch(float v) { asm volatile("" ::"f"(v)); }
__device__ __forceinline__ void touch(uint64_t v) { asm volatile("" ::"l"(v)); }
__device__ __forceinline__ void touch(const void* v) { asm volatile("" ::"l"(v)); }

__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

}  // namespace ptx
}  // namespace collx::cuda
