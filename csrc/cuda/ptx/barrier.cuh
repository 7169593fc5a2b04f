// Barriers for some of the threads of a block. Barrier 0 is the barrier of __syncthreads().
//
// The instructions count whole warps, and a warp that arrives in two groups would be counted twice.
// Therefore __syncwarp() precedes each of them.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda::ptx {

/// Waits for `threads` threads, including those that only arrive.
__device__ __forceinline__ void bar_sync(uint32_t barrier, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Arrives at a barrier of `threads` threads without waiting for it.
__device__ __forceinline__ void bar_arrive(uint32_t barrier, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Waits for `threads` threads. Returns whether `value` is true for any of them.
__device__ __forceinline__ bool bar_or(uint32_t barrier, int threads, bool value) {
  uint32_t any;
  __syncwarp();
  asm volatile(
      "{.reg .pred value, any; setp.ne.u32 value, %1, 0; bar.red.or.pred any, %2, %3, value;"
      " selp.u32 %0, 1, 0, any;}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "r"(barrier), "r"(threads)
      : "memory");
  return any != 0;
}

}  // namespace collx::cuda::ptx
