// Memory of all ranks at one address, as a tensor and a barrier: a vector comes as the sum over the
// ranks, and goes to all of them.
//
// Kernels are made twice, with what carries that out: `Switch`, the hardware; and `Simulated`, with
// which tests alone call them, since no machine that we run tests on lends its switch. It adds up
// in rank order and rounds once, so that its results have the bits of every other algorithm. A
// kernel with the one has none of the other's instructions.
//
// ALIGNMENT  A multicast address takes whole aligned vectors alone. What is none goes by the ranks'
// own addresses, element by element: the end of a tensor, and all of one that is not aligned.
#pragma once

#include "../arguments/vectors.cuh"
#include "../ptx/multimem.cuh"
#include "../stages/reduce.cuh"
#include "barrier.cuh"
#include "sources.cuh"

namespace collx::cuda {

/// Bytes that every rank has. `all`: of all of them at once. They begin `offset` bytes into
/// `tensors`, by rank each rank's own, or, where that is null, into the regions.
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
  /// With release.
  static __device__ __forceinline__ void add(const EveryRank& of, uint64_t offset, uint64_t v) {
    ptx::multimem_red_release_add(of.all + offset, v);
  }
  /// Between accesses by the one address and by the others.
  static __device__ __forceinline__ void fence() { ptx::fence_proxy_alias(); }
};

/// `all` has to be this rank's own address: what is computed of it is what counts, as it is with a
/// switch.
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

/// By one addition that reaches all ranks: of what this rank's flag lacks to its next value. No
/// counter of arrivals, which would be one word for all, but would not say who is missing.
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
  uint64_t value_;  // of this rank's flag at every rank
};

template <typename M>
using MulticastBarrier = BarrierBy<FlagsByMulticast<M>>;

/// A tensor of every rank.
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

/// Vector i of such a tensor, or of messages, as a source: it comes reduced.
template <typename Every>
__device__ __forceinline__ auto from_sums(const Every& tensor, uint64_t i) {
  return from_memory<1>(1, [=](int) { return tensor.sum(i); });
}

/// The staging memory of all ranks, a half of it.
template <typename M, DType D>
__device__ __forceinline__ EveryTensor<M, D> staging_of_all(const KernelCall& call,
                                                            const PullArguments& pull,
                                                            const MulticastArguments& multicast,
                                                            uint32_t parity) {
  const uint64_t offset = pull.staging + parity * pull.staging_bytes;
  return {{call, multicast.region + offset, nullptr, offset}, pull.staging_bytes / dtype_size(D)};
}

}  // namespace collx::cuda
