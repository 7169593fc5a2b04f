// The kernels and their instances. Dtypes are template arguments, as are world sizes 2, 4 and 8
// (their loops unroll). Other world sizes use a run-time loop. A .cuh has the template. A .cu has
// the instances of one template, or of a few similar ones.
#pragma once

#include <utility>

#include "../../protocol/algorithms.h"
#include "../../protocol/epilogue_program.h"
#include "../../protocol/norm.h"

namespace collx::cuda {

/// For the launch: the address of a kernel. Its blocks have at most kFullBlock threads.
using Kernel = const void*;

/// The template arguments of a kernel. A kernel that does not depend on one of them has the same
/// instance for all of its values.
struct Instance {
  DType dtype;
  int world;
  bool simple;             // a simple call: see session.cuh
  bool simulated = false;  // multicast.cuh
  CommonNorm common = CommonNorm::other;
};

using FindKernel = Kernel (*)(const Instance&);

template <typename Function>
Kernel as_kernel(Function* function) {
  return reinterpret_cast<Kernel>(function);
}

/// The world size that a kernel for `world` ranks is compiled for: see World.
constexpr int unrolled(int world) { return world == 2 || world == 4 || world == 8 ? world : 0; }

/// f<W>() for the world size of a call.
template <typename F>
Kernel for_world(int world, F f) {
  switch (unrolled(world)) {
    case 2: return f.template operator()<2>();
    case 4: return f.template operator()<4>();
    case 8: return f.template operator()<8>();
    default: return f.template operator()<0>();
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

/// f<D>() for a dtype for which `kTakes` is true; null for the others.
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

/// f<D, W, Simple>() for a normalization. If a call is not simple, one kernel for each dtype serves
/// all world sizes, since its options make it large.
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

/// f<M>() for the implementation of multicast. Only builds for tests have kernels with `Simulated`.
template <typename F>
Kernel for_multicast(const Instance& i, F f) {
#if COLLX_SIMULATED
  if (i.simulated) return f.template operator()<Simulated>();
#endif
  return i.simulated ? nullptr : f.template operator()<Switch>();
}

/// f<C>() for the common norm of a simple call, for the dtypes that models run in. All other calls
/// use the general kernel.
template <DType D, bool Simple, typename F>
Kernel for_common(const Instance& i, F f) {
  if constexpr (Simple && dtype_size(D) == 2) {
    return for_value(i.common, f);
  } else {
    return f.template operator()<CommonNorm::other>();
  }
}

/// The dtypes for which there are instances. Copies do not depend on the dtype.
enum class DTypes : uint8_t { any, all, normalized, summed };

/// A kernel and its other instances.
struct KernelFamily {
  DTypes dtypes = DTypes::any;
  FindKernel find = nullptr;
  KernelTemplate with_epilogue = {};  // for calls with an epilogue
};

// The kernels that calls launch. `PLAIN(name, dtypes)`: the template takes no epilogue.
// `MAPPING(name, dtypes, options)`: NAME.cuh defines NAME_kernel, which takes one; the options are
// members of KernelTemplate. Each row declares name(instance), which a .cu file defines, and
// kernels::name, which the rows of launchers use. It also causes init to load the kernel.
#define COLLX_KERNELS(PLAIN, MAPPING)                                                          \
  MAPPING(allreduce_oneshot_push, all, .simple = true)                                         \
  MAPPING(allreduce_twoshot_push, all, .simple = true)                                         \
  MAPPING(allreduce_lanes, all, .simple = true)                                                \
  PLAIN(allreduce_wide, all)                                                                   \
  PLAIN(allreduce_pull_push, all)                                                              \
  MAPPING(allreduce_oneshot_pull, all)                                                         \
  MAPPING(allreduce_twoshot_pull, all)                                                         \
  MAPPING(allreduce_multimem_oneshot, summed, .worlds = false, .multicast = true)              \
  MAPPING(allreduce_multimem_twoshot, summed, .worlds = false, .multicast = true)              \
  MAPPING(allreduce_multimem_gather, all, .multicast = true)                                   \
  /* For a reduction, or for copies. */                                                        \
  MAPPING(gather_scatter_staged, all, .simple = true)                                          \
  PLAIN(gather_scatter_staged_copy, any)                                                       \
  PLAIN(gather_scatter_channels, all)                                                          \
  PLAIN(gather_scatter_channels_copy, any)                                                     \
  MAPPING(exchange_lanes, all, .simple = true)                                                 \
  PLAIN(exchange_lanes_copy, any)                                                              \
  PLAIN(exchange_wide, all)                                                                    \
  PLAIN(exchange_wide_copy, any)                                                               \
  PLAIN(gather_scatter_direct, any)                                                            \
  MAPPING(reducescatter_direct, all)                                                           \
  MAPPING(reducescatter_multimem, summed, .worlds = false, .multicast = true)                  \
  PLAIN(allgather_multimem, any)                                                               \
  PLAIN(broadcast_pipelined, any)                                                              \
  PLAIN(broadcast_lanes, any)                                                                  \
  PLAIN(broadcast_twostage, any)                                                               \
  PLAIN(reduce_twostage, all)                                                                  \
  PLAIN(alltoallv_device_splits, any)                                                          \
  PLAIN(alltoallv_direct, any)                                                                 \
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

/// The local reduction of the fallback, which waits for no peer.
Kernel reduce_local(const Instance& i);

}  // namespace collx::cuda
