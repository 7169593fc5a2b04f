// What a receiver does with the vectors that came from all ranks: the stage between slots and
// output. v is by rank; lengths and places of the messages follow from `routes`.
#pragma once

#include "../transports/slots.cuh"
#include "messages.cuh"
#include "reduce.cuh"

namespace collx::cuda {

/// Distance of a rank from this one.
__device__ __forceinline__ int distance_to(const KernelCall& call, int world, int of) {
  return of >= call.rank ? of - call.rank : of - call.rank + world;
}

/// Each into its place.
struct Copy {
  using Slots = MaskedSlots;
  static constexpr bool kCopies = true;
  /// `from`: the ranks of which v holds something, one bit each.
  template <bool Simple, int Ranks>
  static __device__ __forceinline__ void store(const KernelCall& call, const Routes& routes,
                                               int world, uint64_t i, const Vector (&v)[Ranks],
                                               uint32_t from = ~0u) {
#pragma unroll
    for (int source = 0; source < Ranks; ++source) {
      if (source < world && (from >> source & 1) != 0) {
        cuda::store<Simple>(routes.to[distance_to(call, world, source)], i, v[source]);
      }
    }
  }
};

/// All into one, in rank order.
template <DType D>
struct Reduce {
  using Slots = cuda::Slots<D>;
  static constexpr bool kCopies = false;
  template <bool Simple, int Ranks>
  static __device__ __forceinline__ void store(const KernelCall& call, const Routes& routes,
                                               int world, uint64_t i, const Vector (&v)[Ranks]) {
    const ReduceOp op = Simple ? ReduceOp::sum : call.reduce_op;
    cuda::store<Simple>(routes.to[0], i, reduce_vectors<D>(v, world, op));
  }
};

}  // namespace collx::cuda
