// Bulk copies between global and shared memory, by their PTX names: one thread starts a copy of any
// length, and the copy unit of its multiprocessor executes it.
//
// Such a copy is in the async proxy. A fence.proxy.async orders it after generic accesses to the
// same memory that the thread has made, or has observed by an acquire. The completion of a load at
// its barrier, and of stores in wait_stored(), orders the copy before the thread's later accesses.
//
// Addresses and lengths are multiples of 16 bytes.
#pragma once

#include "cluster.cuh"

namespace collx::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COLLX_BULK 1
#else
#define COLLX_BULK 0  // this code is never reached
#endif

/// Copies into shared memory. The barrier counts the bytes.
__device__ __forceinline__ void load_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          TransactionBarrier* barrier) {
#if COLLX_BULK
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

/// Copies from shared memory, in the thread's current group.
__device__ __forceinline__ void store_bulk(void* to, uint32_t from, uint32_t bytes) {
#if COLLX_BULK
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
#endif
}

/// Ends the group. Later stores belong to another group.
__device__ __forceinline__ void commit_stores() {
#if COLLX_BULK
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/// Waits until the stores of all groups except the last `Pending` have read shared memory.
template <int Pending>
__device__ __forceinline__ void wait_read() {
#if COLLX_BULK
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
#endif
}

/// Waits until these stores have arrived.
template <int Pending>
__device__ __forceinline__ void wait_stored() {
#if COLLX_BULK
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

/// This waits for the thread's accesses in flight, like a fence at gpu scope: about a microsecond.
/// Keep it off the data path.
__device__ __forceinline__ void fence_proxy_async() {
#if COLLX_BULK
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
/// For shared memory only. It waits for nothing.
__device__ __forceinline__ void fence_proxy_async_shared() {
#if COLLX_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Whether the phase of that parity has ended, for a barrier at which only threads and loads of
/// this block arrive. It may wait briefly.
__device__ __forceinline__ bool has_ended(TransactionBarrier* barrier, uint32_t parity) {
  uint32_t ended = 1;
#if COLLX_BULK
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return ended != 0;
}

/// Initializes a barrier for several threads.
__device__ __forceinline__ void init(TransactionBarrier* barrier, uint32_t threads) {
#if COLLX_BULK
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(threads)
               : "memory");
#endif
}
__device__ __forceinline__ void arrive(TransactionBarrier* barrier) {
#if COLLX_BULK
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

}  // namespace collx::cuda::ptx
