// The kernels, and the instances of each: dtypes at compile time, worlds 2, 4 and 8 too (their
// loops unroll), other worlds by a run-time loop. A .cuh has the template; a .cu has the instances
// of one template, or of a few that are alike.
#pragma once

#include <utility>

#include "../../protocol/algorithms.h"
#include "../../protocol/epilogue_program.h"
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

/// Of which dtypes there are instances: copies know none.
enum class DTypes : uint8_t { any, all, normalized, summed };

/// A kernel and those that differ from it in their instance alone.
struct KernelFamily {
  DTypes dtypes = DTypes::any;
  FindKernel find = nullptr;
  KernelTemplate with_epilogue = {};  // for calls that have one
};

// The kernels that calls launch. `PLAIN(name, dtypes)`: its template takes no epilogue.
// `MAPPING(name, dtypes, options)`: NAME.cuh has NAME_kernel, which takes one; the options are
// members of KernelTemplate. From a row follow the declaration of name(instance), which a .cu file
// defines; kernels::name, which the rows of launchers have; and that init loads the kernel.
#define COLLX_KERNELS(PLAIN, MAPPING)                                                          \
  MAPPING(allreduce_oneshot_push, all, .simple = true)                                         \
  MAPPING(allreduce_twoshot_push, all, .simple = true)                                         \
  MAPPING(allreduce_lanes, all, .simple = true)                                                \
  PLAIN(allreduce_pull_push, all)                                                              \
  MAPPING(allreduce_oneshot_pull, all)                                                         \
  MAPPING(allreduce_twoshot_pull, all)                                                         \
  MAPPING(allreduce_multimem_oneshot, summed, .worlds = false, .multicast = true)              \
  MAPPING(allreduce_multimem_twoshot, summed, .worlds = false, .multicast = true)              \
  MAPPING(allreduce_multimem_gather, all, .multicast = true)                                   \
  /* Of a reduction, or of copies. */                                                          \
  MAPPING(gather_scatter_staged, all, .simple = true)                                          \
  PLAIN(gather_scatter_staged_copy, any)                                                       \
  PLAIN(gather_scatter_channels, all)                                                          \
  PLAIN(gather_scatter_channels_copy, any)                                                     \
  MAPPING(exchange_lanes, all, .simple = true)                                                 \
  PLAIN(exchange_lanes_copy, any)                                                              \
  PLAIN(gather_scatter_direct, any)                                                            \
  MAPPING(reducescatter_direct, all)                                                           \
  MAPPING(reducescatter_multimem, summed, .worlds = false, .multicast = true)                  \
  PLAIN(allgather_multimem, any)                                                               \
  PLAIN(broadcast_pipelined, any)                                                              \
  PLAIN(broadcast_twostage, any)                                                               \
  PLAIN(reduce_twostage, all)                                                                  \
  PLAIN(alltoallv_device_splits, any)                                                          \
  PLAIN(alltoallv_long, any)                                                                   \
  PLAIN(rank_entry, any)                                                                       \
  PLAIN(rank_barrier, any)                                                                     \
  /* Fused normalizations. */                                                                  \
  MAPPING(norm_oneshot_push, normalized, .simple = true, .rows = true)                         \
  MAPPING(norm_twoshot_push, normalized, .simple = true, .rows = true)                         \
  MAPPING(norm_twoshot_push_sums, normalized, .simple = true, .rows = true)                    \
  MAPPING(norm_oneshot_pull, normalized, .worlds = false, .rows = true)                        \
  MAPPING(norm_twoshot_pull, normalized, .worlds = false, .rows = true)                        \
  MAPPING(norm_multimem_twoshot, normalized, .worlds = false, .rows = true, .multicast = true) \
  MAPPING(norm_local, normalized, .worlds = false, .rows = true)

#define COLLX_DECLARE(kernel, ...) Kernel kernel(const Instance& i);
COLLX_KERNELS(COLLX_DECLARE, COLLX_DECLARE)
#undef COLLX_DECLARE

namespace kernels {

#define COLLX_PLAIN(kernel, of) inline constexpr KernelFamily kernel{DTypes::of, cuda::kernel};
#define COLLX_MAPPING(kernel, of, ...)  \
  inline constexpr KernelFamily kernel{ \
      DTypes::of, cuda::kernel, {.name = #kernel __VA_OPT__(, ) __VA_ARGS__}};
COLLX_KERNELS(COLLX_PLAIN, COLLX_MAPPING)
#undef COLLX_PLAIN
#undef COLLX_MAPPING

#define COLLX_NAME(kernel, ...) kernel,
inline constexpr KernelFamily kAll[] = {COLLX_KERNELS(COLLX_NAME, COLLX_NAME)};
#undef COLLX_NAME

}  // namespace kernels

/// The reduction of the fallback, which waits for nobody.
Kernel reduce_local(const Instance& i);

}  // namespace collx::cuda
