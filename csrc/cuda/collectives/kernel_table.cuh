// One kernel template, all its instances: dtypes at compile time, worlds 2, 4 and 8 too (their
// loops unroll), other worlds by a run-time loop.
#pragma once

#include "../../protocol/call.h"
#include "../../protocol/partition.h"
#include "../stages/reduce.cuh"
#include "../stages/vectors.cuh"
#include "../transports/session.cuh"

namespace collx::cuda {

/// A kernel of an algorithm, for the launch: its arguments are a KernelCall and, where it pulls,
/// PullArguments. Blocks of at most kFullBlock threads, two of them on a multiprocessor.
using Kernel = const void*;

/// The ranks that a kernel instance is compiled for: `Ranks` registers' worth, `world` of them
/// used.
template <int W>
struct World {
  static constexpr int kRanks = W == 0 ? kMaxCudaRanks : W;
  static __device__ __forceinline__ int size(const KernelCall& call) {
    return W == 0 ? call.world : W;
  }
};

/// `Family::kernel<D, W>` for the dtype and world of a call.
template <typename Family>
Kernel find_kernel(DType dtype, int world) {
  const auto of_world = [world]<DType D>() -> Kernel {
    switch (world) {
      case 2:
        return Family::template kernel<D, 2>();
      case 4:
        return Family::template kernel<D, 4>();
      case 8:
        return Family::template kernel<D, 8>();
      default:
        return Family::template kernel<D, 0>();
    }
  };
  switch (dtype) {
    case DType::float32:
      return of_world.template operator()<DType::float32>();
    case DType::float16:
      return of_world.template operator()<DType::float16>();
    case DType::bfloat16:
      return of_world.template operator()<DType::bfloat16>();
    case DType::float64:
      return of_world.template operator()<DType::float64>();
    case DType::int32:
      return of_world.template operator()<DType::int32>();
    case DType::int64:
      return of_world.template operator()<DType::int64>();
    case DType::int8:
      return of_world.template operator()<DType::int8>();
    default:
      return of_world.template operator()<DType::uint8>();
  }
}

// The algorithms, one file each. `simple`: for the calls that session.cuh calls so.
Kernel allreduce_oneshot_push(DType dtype, int world, bool simple);
Kernel allreduce_twoshot_push(DType dtype, int world, bool simple);
Kernel allreduce_pull_push(DType dtype, int world, bool simple);
Kernel allreduce_oneshot_pull(DType dtype, int world, bool simple);
Kernel allreduce_twoshot_pull(DType dtype, int world, bool simple);

}  // namespace collx::cuda
