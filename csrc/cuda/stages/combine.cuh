// Stages: the operations on the vectors of all ranks between a source and a sink.
#pragma once

#include "../arguments/vectors.cuh"
#include "reduce.cuh"

namespace collx::cuda {

/// Stores each rank's vector at its destination.
struct Copy {
  static constexpr bool kReduces = false;
};

/// Reduces the vectors of all ranks to one, in rank order.
template <DType D>
struct Reduce {
  using Elements = cuda::Elements<D>;
  static constexpr bool kReduces = true;
  static constexpr DType kDType = D;
  static constexpr int kElementBytes = dtype_size(D);

  /// The destination of results: a tensor, or the one message of a reduction. `Whole`: the
  /// destination consists of whole vectors.
  template <bool Whole>
  static __device__ __forceinline__ auto output(void* data, uint64_t numel) {
    return DenseTensor<kElementBytes, Whole>(data, numel);
  }
  template <bool Whole>
  static __device__ __forceinline__ auto output(const Message& to) {
    return Run<Whole>(to);
  }

  /// `call`: any type with a member reduce_op.
  template <bool Simple, typename Call, int Ranks>
  static __device__ __forceinline__ Vector reduced(const Call& call, int world,
                                                   const Vector (&v)[Ranks]) {
    return reduce_vectors<D>(v, world, Simple ? ReduceOp::sum : call.reduce_op);
  }
};

/// Reduces one vector from each rank into a sink. All lanes of a warp must call it.
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

/// Loads vector i of the message to each peer for which sends(d) is true, by distance.
template <bool Simple, int Ranks, typename Sends>
__device__ __forceinline__ void load_each(const Routes& routes, int world, uint64_t i,
                                          Vector (&v)[Ranks], Sends sends) {
  for_peers<Ranks>(world, [&](int d) {
    if (sends(d)) v[d] = d > 1 && routes.same ? v[1] : load<Simple>(routes.from[d], i);
  });
}

/// Stores each rank's vector at its destination among the received messages. `ranks`: a bit for
/// each rank that sends a vector.
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
