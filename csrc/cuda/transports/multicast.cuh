// The memory of all ranks at one multicast address, as a tensor and as a barrier. A load returns
// the sum over the ranks, and a store reaches all of them.
//
// Each kernel is compiled for two implementations: `Switch` uses the hardware, and `Simulated`
// emulates it. Only tests use `Simulated`, because no test machine provides multicast on its
// switch. It adds in rank order and rounds once, so its results have the same bits as every other
// algorithm. A kernel that uses one contains no instructions of the other.
//
// ALIGNMENT  A multicast address accepts whole aligned vectors only. All other accesses go through
// the ranks' own addresses: the tail of a tensor, and all of an unaligned tensor.
#pragma once

#include "../arguments/vectors.cuh"
#include "../ptx/multimem.cuh"
#include "../stages/reduce.cuh"
#include "barrier.cuh"
#include "sources.cuh"

namespace collx::cuda {

/// Memory that every rank has. `all`: the address that reaches all ranks. The memory begins
/// `offset` bytes into `tensors` (each rank's own tensor, by rank), or into the regions if
/// `tensors` is null.
struct EveryRank {
  const KernelCall& call;
  char* all;
  const void* const* tensors;
  uint64_t offset;

  __device__ __forceinline__ char* at(int rank) const {
    char* from = tensors == nullptr ? call.region(rank)
                                    : static_cast<char*>(const_cast<void*>(tensors[rank]));
    return from + offset;
  }
};

struct Switch {
  template <DType D>
  static __device__ __forceinline__ Vector sum(const EveryRank& of, uint64_t offset) {
    return ptx::multimem_ld_reduce_add<D>(of.all + offset);
  }
  static __device__ __forceinline__ void store(const EveryRank& of, uint64_t offset, Vector v) {
    ptx::multimem_st(of.all + offset, v);
  }
  /// With release semantics.
  static __device__ __forceinline__ void add(const EveryRank& of, uint64_t offset, uint64_t v) {
    ptx::multimem_red_release_add(of.all + offset, v);
  }
  /// Orders accesses through the multicast address with accesses through the ranks' addresses.
  static __device__ __forceinline__ void fence() { ptx::fence_proxy_alias(); }
};

/// `all` must be this rank's own address. As with a switch, the offset from that address determines
/// the location on every rank.
struct Simulated {
  template <DType D>
  static __device__ __forceinline__ Vector sum(const EveryRank& of, uint64_t offset) {
    const int64_t from_own = of.all + offset - of.at(of.call.rank);
    return sum_of_ranks<D>(of.call.world, [&](int rank) {
      return ptx::ld_relaxed_sys(reinterpret_cast<const Vector*>(of.at(rank) + from_own));
    });
  }
  static __device__ __forceinline__ void store(const EveryRank& of, uint64_t offset, Vector v) {
    const int64_t from_own = of.all + offset - of.at(of.call.rank);
#pragma unroll 1
    for (int rank = 0; rank < of.call.world; ++rank) {
      ptx::st_relaxed_sys(reinterpret_cast<Vector*>(of.at(rank) + from_own), v);
    }
  }
  static __device__ __forceinline__ void add(const EveryRank& of, uint64_t offset, uint64_t v) {
    const int64_t from_own = of.all + offset - of.at(of.call.rank);
#pragma unroll 1
    for (int rank = 0; rank < of.call.world; ++rank) {
      ptx::red_release_add(of.at(rank) + from_own, v);
    }
  }
  static __device__ __forceinline__ void fence() {}
};

/// Sets the flags of all ranks by one addition of the difference between this rank's current and
/// next flag value. A counter of arrivals would need only one word for all ranks, but it could not
/// identify the rank that is missing.
template <typename M>
class FlagsByMulticast {
 public:
  /// The next call computes its addition from this rank's own flag. Without a wait the addition of
  /// the last barrier could still be on its way there, and the next one would overshoot.
  static constexpr bool kAwaitsOwn = true;

  __device__ __forceinline__ FlagsByMulticast(const KernelCall& call, uint64_t offset,
                                              const MulticastArguments& multicast)
      : regions_{call, multicast.region, nullptr, 0},
        value_(*reinterpret_cast<volatile uint64_t*>(call.own() + offset)) {}

  __device__ __forceinline__ void set(int rank, uint64_t offset, uint64_t value) {
    if (rank == regions_.call.rank) M::add(regions_, offset, value - value_);
    value_ = value;
  }
  __device__ __forceinline__ void seen() const { M::fence(); }

 private:
  const EveryRank regions_;
  uint64_t value_;  // the current value of this rank's flag at every rank
};

template <typename M>
using MulticastBarrier = BarrierBy<FlagsByMulticast<M>>;

/// A tensor that exists on every rank.
template <typename M, DType D>
class EveryTensor {
  using Tensor = DenseTensor<dtype_size(D)>;

 public:
  __device__ __forceinline__ EveryTensor(const EveryRank& of, uint64_t numel)
      : of_(of), numel_(numel) {}

  __device__ __forceinline__ Vector sum(uint64_t i) const {
    if (__builtin_expect(whole(i), 1)) return M::template sum<D>(of_, i * kVectorBytes);
    return sum_of_ranks<D>(of_.call.world,
                           [&](int rank) { return Tensor(of_.at(rank), numel_).load_peer(i); });
  }
  __device__ __forceinline__ void store(uint64_t i, Vector v) const {
    if (__builtin_expect(whole(i), 1)) return M::store(of_, i * kVectorBytes, v);
#pragma unroll 1
    for (int rank = 0; rank < of_.call.world; ++rank) Tensor(of_.at(rank), numel_).store(i, v);
  }

 private:
  __device__ __forceinline__ bool whole(uint64_t i) const {
    return Tensor(of_.all, numel_).whole(i);
  }

  const EveryRank of_;
  const uint64_t numel_;
};

/// A source that reads vector i of such a tensor, or of messages, already reduced.
template <typename Every>
__device__ __forceinline__ auto from_sums(const Every& tensor, uint64_t i) {
  return from_memory<1>(1, [=](int) { return tensor.sum(i); });
}

/// One half of the staging memory of all ranks.
template <typename M, DType D>
__device__ __forceinline__ EveryTensor<M, D> staging_of_all(const KernelCall& call,
                                                            const PullArguments& pull,
                                                            const MulticastArguments& multicast,
                                                            uint32_t parity) {
  const uint64_t offset = pull.staging + parity * pull.staging_bytes;
  return {{call, multicast.region + offset, nullptr, offset}, pull.staging_bytes / dtype_size(D)};
}

}  // namespace collx::cuda
