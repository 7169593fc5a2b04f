// A barrier between block b of this rank and block b of every peer.
//
// MEMORY LAYOUT  flags[block][sender] in every rank's region: {epoch : high 32, fingerprint : low
// 32}, counting up and never reset; the epoch reached is kept in the block's own counter.
// MEMORY SEMANTICS  sync() is release and acquire at system scope for all threads of the block:
// bar.sync makes the block's accesses visible to the thread that stores the flag, whose release is
// cumulative; a flag read with acquire, then bar.sync, hands the peer's accesses to the block.
// USAGE  All ranks launch equal grids. Every thread of the block calls sync().
// OVERFLOW  Epochs compare by signed difference. A peer can be one barrier ahead, never two.
#pragma once

#include "session.cuh"

namespace collx::cuda {

class BlockBarrier : public Transport {
 public:
  __device__ __forceinline__ BlockBarrier(const KernelCall& call, const Patience&)
      : call_(call), epoch_(*counter()) {}

  /// False, for the whole block, when a peer did not come.
  __device__ bool sync(Patience& patience, Phase phase) {
    __syncthreads();
    ++epoch_;
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < call_.world && peer != call_.rank && patience.alive()) {
      const uint64_t value = static_cast<uint64_t>(epoch_) << 32 | call_.fingerprint;
      ptx::st_release_sys(flag(peer, call_.rank), value);
      uint64_t seen = 0;
      const bool arrived = patience.wait(
          phase,
          [&] {
            seen = ptx::ld_acquire_sys(flag(call_.rank, peer));
            return epoch_reached(static_cast<uint32_t>(seen >> 32), epoch_);
          },
          [&] {
            return Blame{peer, epoch_, seen >> 32};
          });
      // One that is ahead has compared this barrier's fingerprints itself.
      if (arrived && seen >> 32 == epoch_ && seen != value) {
        patience.fail(Failure::mismatch, phase, Blame{peer, value & ~0u, seen & ~0u});
      }
    }
    return patience.agree();
  }

  /// Keeps the epoch for the block's next call.
  __device__ __forceinline__ void end() {
    if (threadIdx.x == 0) *counter() = epoch_;
  }

 private:
  __device__ uint32_t* counter() const {
    return reinterpret_cast<uint32_t*>(call_.own() + kBarrierEpochs) + blockIdx.x;
  }
  __device__ uint64_t* flag(int owner, int sender) const {
    return reinterpret_cast<uint64_t*>(call_.region(owner) + kBarrierFlags) +
           blockIdx.x * kMaxRanks + sender;
  }

  const KernelCall& call_;
  uint32_t epoch_;
};

}  // namespace collx::cuda
