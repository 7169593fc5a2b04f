// Dependent launch and the clock.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda::ptx {

/// Waits until the grids that this one was launched dependently on have finished and flushed.
/// First thing in every kernel (hazard 13: a load before it may see stale upstream data).
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets grids that depend on this one be launched; their own wait still holds them back until
/// this grid has finished and flushed, so it may be called at once.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Nanoseconds, of a clock that never stops. Coarse (about a microsecond), which bounds of waits
/// do not mind.
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

}  // namespace collx::cuda::ptx
