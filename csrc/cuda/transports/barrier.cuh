// A barrier between block b of this rank and block b of every peer.
//
// MEMORY LAYOUT  flags[block][sender] in every rank's region: {epoch : high 32, fingerprint : low
// 32}. Flags count up and are never reset. The block keeps the current epoch in its own counter. A
// sender also sets its flag in its own region.
// MEMORY SEMANTICS  sync() is release and acquire at system scope for all threads of the block.
// bar.sync makes the block's accesses visible to the thread that stores the flag, whose release is
// cumulative. A flag that is read with acquire, followed by bar.sync, makes the peer's accesses
// visible to the block.
// USAGE  All ranks launch equal grids. Every thread of the block calls sync().
// OVERFLOW  Epochs compare by signed difference. A peer can be one barrier ahead, never two.
//
// `Flags` defines how a flag reaches all ranks. Barriers with different `Flags` share the same flag
// words, one after the other.
#pragma once

#include "session.cuh"

namespace collx::cuda {

/// Sets flags by one store to each rank.
class FlagsByStores {
 public:
  /// Nothing reads this rank's own flag.
  static constexpr bool kAwaitsOwn = false;

  __device__ __forceinline__ FlagsByStores(const KernelCall& call, uint64_t) : call_(call) {}

  /// Called by the first threads, one for each rank. `offset`: of this rank's flag in every region.
  __device__ __forceinline__ void set(int rank, uint64_t offset, uint64_t value) const {
    ptx::st_release_sys(reinterpret_cast<uint64_t*>(call_.region(rank) + offset), value);
  }
  /// Called by all threads after the flags of all ranks have been seen.
  __device__ __forceinline__ void seen() const {}

 private:
  const KernelCall& call_;
};

template <typename Flags>
class BarrierBy : public Transport {
 public:
  /// `given`: further arguments of the flags.
  template <typename... Given>
  __device__ __forceinline__ BarrierBy(const KernelCall& call, const Patience&,
                                       const Given&... given)
      : call_(call), epoch_(*counter()), flags_(call, offset(call.rank), given...) {}

  /// Returns false, for the whole block, if a peer does not arrive.
  __device__ bool sync(Patience& patience, Phase phase) {
    __syncthreads();
    ++epoch_;
    const int peer = static_cast<int>(threadIdx.x);
    const uint64_t value = static_cast<uint64_t>(epoch_) << 32 | call_.fingerprint;
    if (peer < call_.world && patience.alive()) flags_.set(peer, offset(call_.rank), value);
    if (peer < call_.world && (Flags::kAwaitsOwn || peer != call_.rank) && patience.alive()) {
      const auto* flag = reinterpret_cast<const uint64_t*>(call_.own() + offset(peer));
      uint64_t seen = 0;
      const bool arrived = patience.wait(
          phase,
          [&] {
            seen = ptx::ld_acquire_sys(flag);
            return epoch_reached(static_cast<uint32_t>(seen >> 32), epoch_);
          },
          [&] {
            return Blame{peer, epoch_, seen >> 32};
          });
      // A peer that is ahead has compared the fingerprints of this barrier itself.
      if (arrived && seen >> 32 == epoch_ && seen != value) {
        patience.fail(Failure::mismatch, phase, Blame{peer, value & ~0u, seen & ~0u});
      }
    }
    const bool met = patience.agree();
    flags_.seen();
    return met;
  }

  /// Keeps the epoch for the block's next call.
  __device__ __forceinline__ void end() {
    if (threadIdx.x == 0) *counter() = epoch_;
  }

 private:
  __device__ uint32_t* counter() const {
    return reinterpret_cast<uint32_t*>(call_.own() + kBarrierEpochs) + blockIdx.x;
  }
  static __device__ uint64_t offset(int sender) {
    return kBarrierFlags + (blockIdx.x * kMaxRanks + sender) * sizeof(uint64_t);
  }

  const KernelCall& call_;
  uint32_t epoch_;
  Flags flags_;
};

using BlockBarrier = BarrierBy<FlagsByStores>;

}  // namespace collx::cuda
