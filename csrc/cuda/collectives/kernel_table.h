// One kernel template, all its instances: dtypes at compile time, worlds 2, 4 and 8 too (their
// loops unroll), other worlds by a run-time loop. A .cuh has the template; a .cu has the instances
// of one template, or of a few that are alike.
#pragma once

#include <utility>

#include "../../protocol/algorithms.h"
#include "../../protocol/norm.h"

namespace collx::cuda {

/// For the launch: the address of a kernel, whose blocks have at most kFullBlock threads.
using Kernel = const void*;

/// What stands in the arguments of a kernel's template. A kernel that does not depend on one of
/// them has the same instance for all.
struct Instance {
  DType dtype;
  int world;
  bool simple;             // one of the calls that session.cuh calls so
  bool simulated = false;  // multicast.cuh
  CommonNorm common = CommonNorm::other;
};

using FindKernel = Kernel (*)(const Instance&);

template <typename Function>
Kernel as_kernel(Function* function) {
  return reinterpret_cast<Kernel>(function);
}

/// The world that a kernel for `world` ranks is compiled for: see World.
constexpr int unrolled(int world) { return world == 2 || world == 4 || world == 8 ? world : 0; }

/// f<W>() for the world of a call.
template <typename F>
Kernel for_world(int world, F f) {
  switch (unrolled(world)) {
    case 2:
      return f.template operator()<2>();
    case 4:
      return f.template operator()<4>();
    case 8:
      return f.template operator()<8>();
    default:
      return f.template operator()<0>();
  }
}

/// f<V>() for the value of an enum.
template <typename E, typename F>
Kernel for_value(E value, F f) {
  Kernel kernel = nullptr;
  const auto take = [&]<E V>() {
    if (value == V) kernel = f.template operator()<V>();
  };
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (take.template operator()<static_cast<E>(I)>(), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(E::count)>());
  return kernel;
}

constexpr bool is_dtype(DType) { return true; }

/// f<D>() for a dtype that `kTakes`; null for the others.
template <bool (*kTakes)(DType) = is_dtype, typename F>
Kernel for_dtype(DType dtype, F f) {
  return for_value(dtype, [&]<DType D>() -> Kernel {
    if constexpr (kTakes(D)) {
      return f.template operator()<D>();
    } else {
      return nullptr;
    }
  });
}

/// f<D, W>()
template <typename F>
Kernel for_dtype_and_world(const Instance& i, F f) {
  return for_dtype(i.dtype, [&]<DType D>() -> Kernel {
    return for_world(i.world, [&]<int W>() -> Kernel { return f.template operator()<D, W>(); });
  });
}

/// f<D, W, Simple>()
template <typename F>
Kernel for_all(const Instance& i, F f) {
  return for_dtype_and_world(i, [&]<DType D, int W>() -> Kernel {
    return i.simple ? f.template operator()<D, W, true>() : f.template operator()<D, W, false>();
  });
}

/// f<W, Simple>()
template <typename F>
Kernel for_world_and_simple(const Instance& i, F f) {
  return for_world(i.world, [&]<int W>() -> Kernel {
    return i.simple ? f.template operator()<W, true>() : f.template operator()<W, false>();
  });
}

/// f<D, W, Simple>() for a normalization. What is not simple is served for all worlds by one kernel
/// of a dtype, since its options make it large.
template <typename F>
Kernel for_norm(const Instance& i, F f) {
  return for_dtype<can_normalize>(i.dtype, [&]<DType D>() -> Kernel {
    if (!i.simple) return f.template operator()<D, 0, false>();
    return for_world(i.world,
                     [&]<int W>() -> Kernel { return f.template operator()<D, W, true>(); });
  });
}

struct Switch;
struct Simulated;

/// f<M>() for what carries multicast out. Only builds for tests have kernels with `Simulated`.
template <typename F>
Kernel for_multicast(const Instance& i, F f) {
#if COLLX_SIMULATED
  if (i.simulated) return f.template operator()<Simulated>();
#endif
  return i.simulated ? nullptr : f.template operator()<Switch>();
}

/// f<C>() for what a simple call is known to be, of the dtypes that models run in. All others take
/// the kernel for any call.
template <DType D, bool Simple, typename F>
Kernel for_common(const Instance& i, F f) {
  if constexpr (Simple && dtype_size(D) == 2) {
    return for_value(i.common, f);
  } else {
    return f.template operator()<CommonNorm::other>();
  }
}

// The kernels, a .cuh each. Their rows are in allreduce.cu, exchange.cu and norm.cu.
Kernel allreduce_oneshot_push(const Instance& i);
Kernel allreduce_twoshot_push(const Instance& i);
Kernel allreduce_lanes(const Instance& i);
Kernel allreduce_pull_push(const Instance& i);
Kernel allreduce_oneshot_pull(const Instance& i);
Kernel allreduce_twoshot_pull(const Instance& i);
Kernel allreduce_multimem_oneshot(const Instance& i);
Kernel allreduce_multimem_twoshot(const Instance& i);
Kernel allreduce_multimem_gather(const Instance& i);

// Of a reduction, or of copies, which know no dtype.
Kernel gather_scatter_staged_reduce(const Instance& i);
Kernel gather_scatter_staged_copy(const Instance& i);
Kernel gather_scatter_channels_reduce(const Instance& i);
Kernel gather_scatter_channels_copy(const Instance& i);
Kernel exchange_lanes_reduce(const Instance& i);
Kernel exchange_lanes_copy(const Instance& i);
Kernel gather_scatter_direct(const Instance& i);  // `simple`: whole vectors alone
Kernel reducescatter_direct(const Instance& i);
Kernel reducescatter_multimem(const Instance& i);
Kernel allgather_multimem(const Instance& i);
Kernel broadcast_pipelined(const Instance& i);
Kernel broadcast_twostage(const Instance& i);
Kernel reduce_twostage(const Instance& i);
Kernel alltoallv_device_splits(const Instance& i);
Kernel alltoallv_long(const Instance& i);
Kernel rank_barrier(const Instance& i);
Kernel reduce_local(const Instance& i);

// Fused normalizations.
Kernel norm_oneshot_push(const Instance& i);
Kernel norm_twoshot_push(const Instance& i);
Kernel norm_twoshot_push_sums(const Instance& i);
Kernel norm_oneshot_pull(const Instance& i);
Kernel norm_twoshot_pull(const Instance& i);
Kernel norm_multimem_twoshot(const Instance& i);
Kernel norm_local(const Instance& i);

}  // namespace collx::cuda
