// Loads, stores and fences by their PTX names. Everything that another GPU writes or reads goes
// through these: the order and the scope of each access stand in its name.
//
// PTX treats a vector access as separate accesses of its elements, in any order. So a reader must
// look at every element before it believes any: 32-bit elements for 8- to 32-bit types, 64-bit
// elements where a word is 64 bits wide.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda {

/// 16 bytes in registers: what a thread moves at a time.
struct alignas(16) Vector {
  uint32_t word[4];
};

namespace ptx {

// Weak loads, as the compiler would make them, but where they are written: it would otherwise put
// them behind a branch that waits for another load, one flight to memory after the other.
__device__ __forceinline__ Vector ld_here(const Vector* p) {
  Vector v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t ld_here(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

/// Keeps an address in registers, so that a polling loop does not compute it anew in every turn.
template <typename T>
__device__ __forceinline__ T* keep(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

/// The same of an offset: what is computed from it is computed where it is used.
__device__ __forceinline__ uint32_t keep(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

/// Reads a value here, for nothing but its line of a cache.
__device__ __forceinline__ void touch(uint32_t v) { asm volatile("" ::"r"(v)); }
__device__ __forceinline__ void touch(float v) { asm volatile("" ::"f"(v)); }
__device__ __forceinline__ void touch(uint64_t v) { asm volatile("" ::"l"(v)); }
__device__ __forceinline__ void touch(const void* v) { asm volatile("" ::"l"(v)); }

__device__ __forceinline__ Vector ld_relaxed_sys(const Vector* p) {
  Vector v;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed_sys(Vector* p, Vector v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

/// The same in two 64-bit elements, each of which arrives whole.
__device__ __forceinline__ Vector ld_relaxed_sys_b64(const Vector* p) {
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(p)
               : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
           static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
}

__device__ __forceinline__ void st_relaxed_sys_b64(Vector* p, Vector v) {
  const uint64_t low = v.word[0] | static_cast<uint64_t>(v.word[1]) << 32;
  const uint64_t high = v.word[2] | static_cast<uint64_t>(v.word[3]) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(low), "l"(high)
               : "memory");
}

__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
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

__device__ __forceinline__ void st_relaxed_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

/// Four words side by side, each with acquire.
__device__ __forceinline__ Vector ld_acquire_sys(const Vector* p) {
  Vector v;
  asm volatile("ld.acquire.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void st_release_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

/// A word in shared memory, between the threads of a block.
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

/// Adds without asking for the result, so that nothing waits for it.
__device__ __forceinline__ void red_add(uint32_t* p, uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void red_add(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

}  // namespace ptx
}  // namespace collx::cuda
