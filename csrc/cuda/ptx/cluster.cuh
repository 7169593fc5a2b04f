// Thread-block clusters: their barrier, and stores into the shared memory of a neighbour. Without
// hardware for them a cluster is one block, and nothing here is reached.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COLLX_CLUSTERS 1
#else
#define COLLX_CLUSTERS 0
#endif

/// By every thread of the cluster, in turn with the wait. Releases what the thread has written.
__device__ __forceinline__ void cluster_arrive() {
#if COLLX_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

/// Acquires what all threads of the cluster had written when they arrived.
__device__ __forceinline__ void cluster_wait() {
#if COLLX_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Two words into the shared memory of block `rank` of the cluster, where `here` points in this one.
__device__ __forceinline__ void st_cluster(const void* here, uint32_t rank, uint32_t low,
                                           uint32_t high) {
#if COLLX_CLUSTERS
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(here));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
  asm volatile("st.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(there), "r"(low), "r"(high)
               : "memory");
#endif
}

}  // namespace collx::cuda::ptx
