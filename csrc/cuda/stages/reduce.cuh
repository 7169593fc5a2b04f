// The arithmetic of every reduction: rank 0's value, then ranks 1 to W-1 in that order, in a wider
// type, rounded once to nearest even. The reduce op is uniform over the grid and selected at run
// time: the interconnect is the bottleneck, not the ALU.
//
// Built with --fmad=false and without fast-math: the compiler keeps the order and the roundings
// that are written here (docs/internals/numerics.md).
#pragma once

#include "../../protocol/cuda_layout.h"
#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"

namespace collx::cuda {

/// Converts the elements of a vector to accumulators and back.
template <DType D>
struct Elements;

template <>
struct Elements<DType::float32> {
  using Acc = float;
  static constexpr int kCount = 4;
  static __device__ __forceinline__ Acc get(const Vector& v, int i) {
    return __uint_as_float(v.word[i]);
  }
  static __device__ __forceinline__ Vector pack(const Acc* a) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = __float_as_uint(a[i]);
    return v;
  }
};

template <>
struct Elements<DType::bfloat16> {
  using Acc = float;
  static constexpr int kCount = 8;
  static __device__ __forceinline__ Acc get(const Vector& v, int i) {
    const uint32_t word = v.word[i / 2];
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
  }
  static __device__ __forceinline__ Vector pack(const Acc* a) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v.word[i] = ptx::cvt_rn_bf16x2(a[2 * i], a[2 * i + 1]);
    }
    return v;
  }
};

template <>
struct Elements<DType::float16> {
  using Acc = float;
  static constexpr int kCount = 8;
  static __device__ __forceinline__ Acc get(const Vector& v, int i) {
    return ptx::cvt_f32_f16(v.word[i / 2] >> (i % 2 * 16));
  }
  static __device__ __forceinline__ Vector pack(const Acc* a) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v.word[i] = ptx::cvt_rn_f16x2(a[2 * i], a[2 * i + 1]);
    }
    return v;
  }
};

template <>
struct Elements<DType::float64> {
  using Acc = double;
  static constexpr int kCount = 2;
  static __device__ __forceinline__ Acc get(const Vector& v, int i) {
    return __hiloint2double(static_cast<int>(v.word[2 * i + 1]), static_cast<int>(v.word[2 * i]));
  }
  static __device__ __forceinline__ Vector pack(const Acc* a) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v.word[2 * i] = static_cast<uint32_t>(__double2loint(a[i]));
      v.word[2 * i + 1] = static_cast<uint32_t>(__double2hiint(a[i]));
    }
    return v;
  }
};

template <>
struct Elements<DType::int64> {
  using Acc = int64_t;
  static constexpr int kCount = 2;
  static __device__ __forceinline__ Acc get(const Vector& v, int i) {
    return static_cast<int64_t>(half_of(v, i));
  }
  static __device__ __forceinline__ Vector pack(const Acc* a) {
    return vector_of(static_cast<uint64_t>(a[0]), static_cast<uint64_t>(a[1]));
  }
};

/// int32, int8, uint8: computed in 32 bits and truncated to their width, which is the same as
/// wrapping.
template <typename T>
struct SmallIntegers {
  using Acc = int32_t;
  static constexpr int kCount = kVectorBytes / sizeof(T);
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kBits = 8 * sizeof(T);
  static __device__ __forceinline__ Acc get(const Vector& v, int i) {
    return static_cast<T>(v.word[i / kPerWord] >> (i % kPerWord * kBits));
  }
  static __device__ __forceinline__ Vector pack(const Acc* a) {
    constexpr uint32_t mask = kBits == 32 ? ~0u : (1u << (kBits % 32)) - 1;
    Vector v{};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v.word[i / kPerWord] |= (static_cast<uint32_t>(a[i]) & mask) << (i % kPerWord * kBits);
    }
    return v;
  }
};

template <>
struct Elements<DType::int32> : SmallIntegers<int32_t> {};
template <>
struct Elements<DType::int8> : SmallIntegers<int8_t> {};
template <>
struct Elements<DType::uint8> : SmallIntegers<uint8_t> {};

template <DType D>
__device__ __forceinline__ void unpack(const Vector& v, typename Elements<D>::Acc* to) {
#pragma unroll
  for (int i = 0; i < Elements<D>::kCount; ++i) to[i] = Elements<D>::get(v, i);
}

template <typename V>
inline constexpr bool kIsFloat = false;
template <>
inline constexpr bool kIsFloat<float> = true;
template <>
inline constexpr bool kIsFloat<double> = true;

namespace detail {

// Integers wrap. Signed overflow is undefined in C++, so the operation uses unsigned integers.
template <typename A, typename F>
__device__ __forceinline__ A wrapped(A a, A b, F f) {
  if constexpr (kIsFloat<A>) {
    return f(a, b);
  } else {
    return static_cast<A>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  }
}
template <typename A>
__device__ __forceinline__ A add(A a, A b) {
  return wrapped(a, b, [](auto x, auto y) { return x + y; });
}
template <typename A>
__device__ __forceinline__ A multiply(A a, A b) {
  return wrapped(a, b, [](auto x, auto y) { return x * y; });
}

// fmaxf and fminf drop NaN and do not order zeros. These propagate NaN and order +0 above -0.
template <typename A>
__device__ __forceinline__ bool sign(A) {
  return false;
}
template <>
__device__ __forceinline__ bool sign(float a) {
  return __float_as_int(a) < 0;
}
template <>
__device__ __forceinline__ bool sign(double a) {
  return __double_as_longlong(a) < 0;
}
template <typename A>
__device__ __forceinline__ A larger(A a, A b) {
  if (a != a) return a;
  if (b != b) return b;
  return a > b || (a == b && !sign(a)) ? a : b;
}
template <typename A>
__device__ __forceinline__ A smaller(A a, A b) {
  if (a != a) return a;
  if (b != b) return b;
  return a < b || (a == b && sign(a)) ? a : b;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// A single instruction each.
template <>
__device__ __forceinline__ float larger(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}
template <>
__device__ __forceinline__ float smaller(float a, float b) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}
#endif

}  // namespace detail

/// Combines the ranks' vectors, which are given in rank order: all `Ranks` of them, or the first
/// `world`.
template <DType D, int Ranks, typename Combine>
__device__ __forceinline__ void fold(typename Elements<D>::Acc* acc, const Vector (&v)[Ranks],
                                     int world, Combine combine) {
  using E = Elements<D>;
  unpack<D>(v[0], acc);
#pragma unroll
  for (int rank = 1; rank < Ranks; ++rank) {
    if (rank < world) {
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) acc[i] = combine(acc[i], E::get(v[rank], i));
    }
  }
}

/// The sum of the ranks' vectors. It takes the registers of two vectors for any number of ranks:
/// `load(rank)` is called immediately before the addition.
template <DType D, typename Load>
__device__ __forceinline__ Vector sum_of_ranks(int world, Load load) {
  using E = Elements<D>;
  typename E::Acc acc[E::kCount];
  unpack<D>(load(0), acc);
#pragma unroll 1
  for (int rank = 1; rank < world; ++rank) {
    const Vector v = load(rank);
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) acc[i] = detail::add(acc[i], E::get(v, i));
  }
  return E::pack(acc);
}

template <DType D, int Ranks>
__device__ __forceinline__ Vector reduce_vectors(const Vector (&v)[Ranks], int world, ReduceOp op) {
  using E = Elements<D>;
  using A = typename E::Acc;
  A acc[E::kCount];
  // The common op takes the fall-through path: a small call pays for each line of code that it
  // fetches.
  if (__builtin_expect(op == ReduceOp::sum, 1)) {
    fold<D>(acc, v, world, [](A a, A b) { return detail::add(a, b); });
  } else if (op == ReduceOp::avg) {
    fold<D>(acc, v, world, [](A a, A b) { return detail::add(a, b); });
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) acc[i] = acc[i] / static_cast<A>(world);
  } else if (op == ReduceOp::max) {
    fold<D>(acc, v, world, [](A a, A b) { return detail::larger(a, b); });
  } else if (op == ReduceOp::min) {
    fold<D>(acc, v, world, [](A a, A b) { return detail::smaller(a, b); });
  } else {
    static_assert(static_cast<int>(ReduceOp::prod) == 4 && static_cast<int>(ReduceOp::count) == 5,
                  "each other reduce op has a branch above");
    fold<D>(acc, v, world, [](A a, A b) { return detail::multiply(a, b); });
  }
  return E::pack(acc);
}

}  // namespace collx::cuda
