// One kernel template, all its instances: dtypes at compile time, worlds 2, 4 and 8 too (their
// loops unroll), other worlds by a run-time loop.
#pragma once

#include "../../protocol/call.h"
#include "../../protocol/partition.h"
#include "../stages/reduce.cuh"
#include "../stages/vectors.cuh"
#include "../transports/session.cuh"

namespace collx::cuda {

/// One for each instance of World below.
inline constexpr int kCompiledWorlds[] = {2, 3, 4, 8};

/// The ranks that a kernel instance is compiled for: `Ranks` registers' worth, `world` of them
/// used.
template <int W>
struct World {
  static constexpr int kRanks = W == 0 ? kMaxCudaRanks : W;
  static __device__ __forceinline__ int size(const KernelCall& call) {
    return W == 0 ? call.world : W;
  }
};

/// `Family::kernel<W>` for the world of a call.
template <typename Family>
Kernel find_world(int world) {
  switch (world) {
    case 2:
      return Family::template kernel<2>();
    case 4:
      return Family::template kernel<4>();
    case 8:
      return Family::template kernel<8>();
    default:
      return Family::template kernel<0>();
  }
}

namespace detail {
template <typename Family, DType D>
struct OfDType {
  template <int W>
  static Kernel kernel() {
    return Family::template kernel<D, W>();
  }
};
}  // namespace detail

/// `Family::kernel<D, W>` for the dtype and world of a call.
template <typename Family>
Kernel find_kernel(DType dtype, int world) {
  const auto of_world = [world]<DType D>() -> Kernel {
    return find_world<detail::OfDType<Family, D>>(world);
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

/// `f<D>()` for the dtypes that are normalized.
template <typename F>
Kernel find_norm_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::float32:
      return f.template operator()<DType::float32>();
    case DType::float16:
      return f.template operator()<DType::float16>();
    default:
      return f.template operator()<DType::bfloat16>();
  }
}

/// `Family::kernel<D, W, Simple>` for a normalization. What is not simple is served for all worlds
/// by one kernel of a dtype, since its options make it large.
template <typename Family>
Kernel find_norm_kernel(DType dtype, int world, bool simple) {
  return find_norm_dtype(dtype, [=]<DType D>() -> Kernel {
    if (!simple) return Family::template kernel<D, 0, false>();
    switch (world) {
      case 2:
        return Family::template kernel<D, 2, true>();
      case 4:
        return Family::template kernel<D, 4, true>();
      case 8:
        return Family::template kernel<D, 8, true>();
      default:
        return Family::template kernel<D, 0, true>();
    }
  });
}

// The algorithms, one file each. `simple`: for the calls that session.cuh calls so.
Kernel allreduce_oneshot_push(DType dtype, int world, bool simple);
Kernel allreduce_twoshot_push(DType dtype, int world, bool simple);
Kernel allreduce_pull_push(DType dtype, int world, bool simple);
Kernel allreduce_oneshot_pull(DType dtype, int world, bool simple);
Kernel allreduce_twoshot_pull(DType dtype, int world, bool simple);

// `dtype`: of a reduction; copies know none.
Kernel exchange_staged(bool reduces, DType dtype, int world, bool simple);
Kernel channels_staged(bool reduces, DType dtype, int world, bool simple);
Kernel exchange_direct(int world, bool plain);
Kernel reduce_direct(DType dtype, int world);
Kernel broadcast_pipelined(int world, bool simple);
Kernel reduce_twostage(DType dtype, int world);
Kernel broadcast_twostage(int world);
Kernel alltoallv_device_splits(int world);
Kernel rank_barrier();

// Fused normalizations.
Kernel norm_oneshot_push(DType dtype, int world, bool simple);
Kernel norm_twoshot_push(DType dtype, int world, bool simple);
Kernel norm_twoshot_push_sums(DType dtype, int world, bool simple);
Kernel norm_oneshot_pull(DType dtype);
Kernel norm_twoshot_pull(DType dtype);
Kernel norm_local(DType dtype);

}  // namespace collx::cuda
