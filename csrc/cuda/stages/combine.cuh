// Stages: what is done with the vectors of all ranks on their way from a source to a sink.
#pragma once

#include "../arguments/vectors.cuh"
#include "reduce.cuh"

namespace collx::cuda {

/// Each goes where it belongs.
struct Copy {
  static constexpr bool kReduces = false;
};

/// One is made of them, in rank order.
template <DType D>
struct Reduce {
  using Elements = cuda::Elements<D>;
  static constexpr bool kReduces = true;
  static constexpr DType kDType = D;
  static constexpr int kElementBytes = dtype_size(D);

  /// Where results go: a tensor, or the one message of a reduction. `Whole`: of whole vectors.
  template <bool Whole>
  static __device__ __forceinline__ auto output(void* data, uint64_t numel) {
    return DenseTensor<kElementBytes, Whole>(data, numel);
  }
  template <bool Whole>
  static __device__ __forceinline__ auto output(const Message& to) {
    return Run<Whole>(to);
  }

  /// `call`: whatever has a reduce_op.
  template <bool Simple, typename Call, int Ranks>
  static __device__ __forceinline__ Vector reduced(const Call& call, int world,
                                                   const Vector (&v)[Ranks]) {
    return reduce_vectors<D>(v, world, Simple ? ReduceOp::sum : call.reduce_op);
  }
};

/// A vector of each rank, reduced, to a sink. By whole warps.
template <typename Stage, bool Simple = false, typename Call, typename Source, typename Sink>
__device__ __forceinline__ void reduce_into(const Call& call, int world, const Source& source,
                                            const Sink& sink) {
  Vector v[Source::kRanks];
  const bool arrived = source.take(v);
  const auto prepared = sink.prepare(Stage::template reduced<Simple>(call, world, v));
  if (!arrived) return;
  sink.put(prepared);
  source.rearm();
}

/// Vector i of the message to each peer, by distance, of which sends(d) is true.
template <bool Simple, int Ranks, typename Sends>
__device__ __forceinline__ void load_each(const Routes& routes, int world, uint64_t i,
                                          Vector (&v)[Ranks], Sends sends) {
  for_peers<Ranks>(world, [&](int d) {
    if (sends(d)) v[d] = d > 1 && routes.same ? v[1] : load<Simple>(routes.from[d], i);
  });
}

/// Each rank's vector, to its place among the messages that arrive. `ranks`: those that send one, a
/// bit each.
template <bool Simple, int Ranks>
__device__ __forceinline__ void store_each(const KernelCall& call, const Routes& routes, int world,
                                           uint64_t i, const Vector (&v)[Ranks],
                                           uint32_t ranks = ~0u) {
#pragma unroll
  for (int rank = 0; rank < Ranks; ++rank) {
    if (rank < world && (ranks >> rank & 1) != 0) {
      store<Simple>(routes.to[call.distance_to(rank, world)], i, v[rank]);
    }
  }
}

}  // namespace collx::cuda
