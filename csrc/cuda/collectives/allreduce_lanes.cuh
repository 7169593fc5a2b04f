// All-reduce, two-shot, by chunks in lanes: every rank scatters its tensor to the owners of its
// parts. An owner reduces its part and sends the result to all ranks. Results go into the outputs
// if these are symmetric. Otherwise they go into slots, from which each rank stores them to its
// output.
//
// Cost: 2 (W-1)/W of the tensor on each link.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/chunks.cuh"

namespace collx::cuda {

/// A part of a tensor, by vectors.
template <typename Tensor>
struct PartOf {
  using Ahead = typename Tensor::Ahead;
  const Tensor& tensor;
  const uint64_t start;

  __device__ __forceinline__ Vector load(uint64_t i) const { return tensor.load(start + i); }
  __device__ __forceinline__ Vector begin_load(uint64_t i) const {
    return tensor.begin_load(start + i);
  }
  __device__ __forceinline__ Vector end_load(uint64_t i, const Vector& begun) const {
    return tensor.end_load(start + i, begun);
  }
  __device__ __forceinline__ Ahead ahead(uint64_t i) const { return tensor.ahead(start + i); }
  __device__ __forceinline__ void store(uint64_t i, Vector v, const Ahead& ahead) const {
    tensor.store(start + i, v, ahead);
  }
};
template <typename Tensor>
PartOf(const Tensor&, uint64_t) -> PartOf<Tensor>;

/// `Simple`: a sum of whole vectors.
template <typename Stage, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kLaneBound, 2)
    allreduce_lanes_kernel(const __grid_constant__ KernelCall call,
                           const __grid_constant__ LaneArguments lanes,
                           const __grid_constant__ Epilogue... epilogue) {
  Session<Lanes<W, 2>> session(call, lanes);
  const auto& transport = session.transport;
  const int world = World<W>::size(call);
  const DenseTensor<Stage::kElementBytes, Simple> input(call.input, call.numel);
  const auto output = Stage::template output<Simple>(call.output, call.numel, epilogue...);
  const Partition parts(input.vectors(), world);
  const auto chunk = [&](const Part& part, uint32_t i) {
    return transport.chunk(lanes.sent[1], i, part.count);
  };

  const auto scatter = [&](const RoleThreads& role, uint32_t i, auto ready, auto slot) {
    bool asked = false;
#pragma unroll 1
    for (int d = 1; d < world; ++d) {
      const Part part = parts.part(call.rank_at(d, world));
      if (!send_chunk(role, PartOf{input, part.start}, chunk(part, i), slot(d), ready, asked)) {
        return false;
      }
    }
    return true;
  };

  const auto reduce = [&](const RoleThreads& role, uint32_t i, auto ready, auto from, auto slot) {
    const Part part = parts.part(call.rank);
    const Chunk own = chunk(part, i);
    const auto to = [&](int d) {
      return transport.direct()
                 ? reinterpret_cast<Vector*>(lanes.output[d]) + part.start + own.first
                 : slot(d);
    };
    return reduce_chunk<Stage, W, Simple, true>(call, world, role, PartOf{input, part.start},
                                                PartOf{output, part.start}, own, ready, from, to);
  };

  const auto gather = [&](const RoleThreads& role, uint32_t i, auto ready, auto slot) {
    if (!ready()) return false;
#pragma unroll 1
    for (int d = 1; d < world; ++d) {
      const Part part = parts.part(call.rank_at(d, world));
      take_chunk(role, PartOf{output, part.start}, chunk(part, i), slot(d));
    }
    return true;
  };

  session.transport.run(session.patience, scatter, reduce, gather);
}

}  // namespace collx::cuda
