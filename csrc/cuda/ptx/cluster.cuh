// Thread-block clusters: stores into the shared memory of a neighbor block, which signal a barrier
// there. Without hardware support a cluster is one block, and this code is never reached.
//
// The cluster's own barrier is used once, at the start. A release on it would wait for all accesses
// that a thread has in flight, including stores to other GPUs.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COLLX_CLUSTERS 1
#else
#define COLLX_CLUSTERS 0
#endif

/// A barrier in shared memory with one arrival and a number of bytes in each phase.
using TransactionBarrier = unsigned long long;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Called by one thread, before cluster_arrive().
__device__ __forceinline__ void init(TransactionBarrier* barrier) {
#if COLLX_CLUSTERS
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Called by every thread of the cluster, followed by the wait. After the wait all blocks of the
/// cluster run, and their barriers can be used.
__device__ __forceinline__ void cluster_arrive() {
#if COLLX_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if COLLX_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// The single arrival of a phase. The phase ends after that many bytes have arrived.
__device__ __forceinline__ void expect(TransactionBarrier* barrier, uint32_t bytes) {
#if COLLX_CLUSTERS
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

/// Waits until the phase of that parity has ended, so that its bytes have arrived. The bytes come
/// from other blocks of the cluster, hence the cluster scope.
///
/// The wait needs no timeout. The hardware runs all blocks of a cluster at once. Each block goes
/// through the same reductions in the same order, even after a failure: a thread that has failed
/// skips waits and stores to peers, but never a reduction. All other waits before a reduction are
/// bounded by the communicator's timeout. Therefore the neighbors' bytes arrive. A timeout would do
/// harm: the shared memory of a block that exits is released, and a neighbor's store into it is an
/// error that destroys the context.
__device__ __forceinline__ void wait(TransactionBarrier* barrier, uint32_t parity) {
#if COLLX_CLUSTERS
  uint32_t ended = 0;
  while (ended == 0) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#endif
}

/// Stores eight bytes to the address of `here` in block `rank` of the cluster, and signals its
/// barrier.
__device__ __forceinline__ void st_cluster(const void* here, TransactionBarrier* barrier,
                                           uint32_t rank, uint32_t low, uint32_t high) {
#if COLLX_CLUSTERS
  uint32_t there, announced;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(announced)
      : "r"(shared_address(barrier)), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
          "r"(there),
      "r"(low), "r"(high), "r"(announced)
      : "memory");
#endif
}

}  // namespace collx::cuda::ptx
