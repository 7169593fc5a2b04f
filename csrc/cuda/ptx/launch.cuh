// Dependent launch and the clock.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda::ptx {

/// Waits until the grids that this grid depends on have finished and flushed their writes. It is
/// the first operation of every kernel (hazard 13: a load before it may see stale upstream data).
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allows the launch of grids that depend on this one. Their own griddepcontrol_wait() still blocks
/// until this grid has finished and flushed, so this may be called at any time.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Nanoseconds of a clock that never stops. Its resolution is about a microsecond, which is
/// sufficient for timeouts.
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

}  // namespace collx::cuda::ptx
