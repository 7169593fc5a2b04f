// The kernel template. Each reduce_<level>.cpp includes it once, after at_level.h has set the
// target of the functions that follow. COLLX_SIMD_LEVEL is a separate namespace for each level: a
// function that is compiled for one level must never replace that of another level.
//
// There is no include guard, and this file includes only such templates: everything that it
// includes gets the target too.

#include "formats_template.h"

namespace collx::cpu::COLLX_SIMD_LEVEL {

// Operations. Integers wrap, so they are added and multiplied as unsigned.

template <typename F>
inline constexpr bool kIsFloat = std::is_floating_point_v<
    std::remove_reference_t<decltype(std::declval<typename F::Acc&>()[0])>>;

template <typename F>
struct Sum {
  using Acc = typename F::Acc;
  static Acc combine(const Acc& a, const Acc& b) {
    if constexpr (kIsFloat<F>) return a + b;
    using Bits = typename F::Bits;
    return bits<Acc>(bits<Bits>(a) + bits<Bits>(b));
  }
  static Acc finish(const Acc& a, int) { return a; }
};

template <typename F>
struct Avg : Sum<F> {
  using Acc = typename F::Acc;
  static Acc finish(const Acc& a, int world) {
    return a / static_cast<std::remove_reference_t<decltype(std::declval<Acc&>()[0])>>(world);
  }
};

template <typename F>
struct Prod {
  using Acc = typename F::Acc;
  static Acc combine(const Acc& a, const Acc& b) {
    if constexpr (kIsFloat<F>) return a * b;
    using Bits = typename F::Bits;
    return bits<Acc>(bits<Bits>(a) * bits<Bits>(b));
  }
  static Acc finish(const Acc& a, int) { return a; }
};

// Equal floats with different bits are zeros of different sign: AND gives +0 and OR gives -0. A NaN
// is unequal to everything and wins on either side.
template <typename F, bool kMax>
struct Extremum {
  using Acc = typename F::Acc;
  static Acc combine(const Acc& a, const Acc& b) {
    const auto a_wins = kMax ? a > b : a < b;
    if constexpr (!kIsFloat<F>) return a_wins ? a : b;
    using Bits = typename F::Bits;
    const Bits x = bits<Bits>(a), y = bits<Bits>(b);
    const Acc other = a == b ? bits<Acc>(kMax ? x & y : x | y) : b;
    return a_wins || a != a ? a : other;
  }
  static Acc finish(const Acc& a, int) { return a; }
};
template <typename F>
using Max = Extremum<F, true>;
template <typename F>
using Min = Extremum<F, false>;

// Memory. Cache lines that a peer holds have a high latency, so many of them must be in flight at
// once. Therefore long arrays are processed at several places in turn, each of which a hardware
// prefetcher follows. Lines are also prefetched, and output lines are prefetched for writing.

inline constexpr int kStreams = 4;
inline constexpr uint64_t kStreamedBytes = 16 << 10;
inline constexpr int kStreamedWorld =
    4;  // more arrays than that fill the prefetchers by themselves
inline constexpr uint64_t kAhead = 256;

/// Lines whose distance is a power of two share a cache set, and tensors often have such sizes.
/// Therefore the places are an odd number of lines apart. kAhead is within that distance.
inline uint64_t stream_bytes(uint64_t bytes) {
  const uint64_t lines = bytes / kStreams / 64;
  return (lines - (lines - 5) % 16) * 64;
}

/// Vector v of `kCount` is at byte offset at + v * stride.
template <typename F, typename Op, int kCount>
inline __attribute__((always_inline)) void reduce_vectors(const Reduction& r, uint64_t at,
                                                          uint64_t stride) {
  constexpr int kTotal = kCount * F::kParts;
  typename F::Acc acc[kTotal], next[kTotal];
#pragma GCC unroll 8
  for (int v = 0; v < kCount; ++v) {
    F::load(static_cast<const char*>(r.inputs[0]) + at + v * stride, acc + v * F::kParts);
  }
  for (int rank = 1; rank < r.world; ++rank) {
    const char* const input = static_cast<const char*>(r.inputs[rank]) + at;
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) F::load(input + v * stride, next + v * F::kParts);
#pragma GCC unroll 8
    for (int i = 0; i < kTotal; ++i) acc[i] = Op::combine(acc[i], next[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTotal; ++i) acc[i] = Op::finish(acc[i], r.world);
  for (int o = 0; o < r.copies; ++o) {
    char* const output = static_cast<char*>(r.outputs[o]) + at;
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) F::store(acc + v * F::kParts, output + v * stride);
  }
}

/// The last bytes, fewer than a vector, through a vector that is padded with zeros.
template <typename F, typename Op>
void reduce_tail(const Reduction& r, uint64_t at, uint64_t bytes) {
  alignas(kVectorSize) char padded[kMaxRanks][kVectorSize];
  alignas(kVectorSize) char result[kVectorSize];
  const void* inputs[kMaxRanks] = {};
  void* const output = result;
  for (int rank = 0; rank < r.world; ++rank) {
    __builtin_memset(padded[rank], 0, kVectorSize);
    __builtin_memcpy(padded[rank], static_cast<const char*>(r.inputs[rank]) + at, bytes);
    inputs[rank] = padded[rank];
  }
  reduce_vectors<F, Op, 1>({inputs, r.world, &output, 1, 0}, 0, 0);
  for (int o = 0; o < r.copies; ++o) {
    __builtin_memcpy(static_cast<char*>(r.outputs[o]) + at, result, bytes);
  }
}

template <bool kWrite>
inline __attribute__((always_inline)) void fetch_streams(const void* array, uint64_t at,
                                                         uint64_t stream) {
  const char* const ahead = static_cast<const char*>(array) + at + kAhead;
#pragma GCC unroll 8
  for (uint64_t s = 0; s < kStreams; ++s) __builtin_prefetch(ahead + s * stream, kWrite);
}

template <typename F, typename Op>
void reduce_streams(const Reduction& r, uint64_t stream) {
  for (uint64_t at = 0; at < stream; at += kVectorSize) {
    for (int rank = 0; rank < r.world; ++rank) fetch_streams<false>(r.inputs[rank], at, stream);
    for (int o = 0; o < r.copies; ++o) fetch_streams<true>(r.outputs[o], at, stream);
    reduce_vectors<F, Op, kStreams>(r, at, stream);
  }
}

template <typename F, typename Op>
void reduce_span(const Reduction& r) {
  constexpr int kUnroll = 4 / F::kParts;
  const uint64_t bytes = r.numel * sizeof(typename F::Stored);
  uint64_t at = 0;
  if (bytes >= kStreamedBytes && r.world <= kStreamedWorld) {
    reduce_streams<F, Op>(r, stream_bytes(bytes));
    at = kStreams * stream_bytes(bytes);
  }
  for (; at + kUnroll * kVectorSize <= bytes; at += kUnroll * kVectorSize) {
    reduce_vectors<F, Op, kUnroll>(r, at, kVectorSize);
  }
  for (; at + kVectorSize <= bytes; at += kVectorSize) {
    reduce_vectors<F, Op, 1>(r, at, kVectorSize);
  }
  if (at < bytes) reduce_tail<F, Op>(r, at, bytes - at);
}

inline void copy_span(void* to, const void* from, uint64_t bytes) {
  char* const target = static_cast<char*>(to);
  const char* const source = static_cast<const char*>(from);
  uint64_t done = 0;
  if (bytes >= kStreamedBytes) {
    const uint64_t stream = stream_bytes(bytes);
    for (uint64_t at = 0; at < stream; at += kVectorSize) {
      fetch_streams<false>(source, at, stream);
      fetch_streams<true>(target, at, stream);
      Bits32 vectors[kStreams];
#pragma GCC unroll 8
      for (uint64_t s = 0; s < kStreams; ++s) {
        vectors[s] = load_vector<Bits32>(source + at + s * stream);
      }
#pragma GCC unroll 8
      for (uint64_t s = 0; s < kStreams; ++s) {
        store_vector(target + at + s * stream, vectors[s]);
      }
    }
    done = kStreams * stream;
  }
  if (done < bytes) __builtin_memcpy(target + done, source + done, bytes - done);
}

static_assert(static_cast<int>(ReduceOp::prod) == 4 && static_cast<int>(ReduceOp::count) == 5,
              "each reduce op except the average of integers has a kernel below");

template <typename F>
constexpr ReduceOpKernels float_kernels() {
  return {reduce_span<F, Sum<F>>, reduce_span<F, Avg<F>>, reduce_span<F, Max<F>>,
          reduce_span<F, Min<F>>, reduce_span<F, Prod<F>>};
}
template <typename F>
constexpr ReduceOpKernels integer_kernels() {
  return {reduce_span<F, Sum<F>>, nullptr, reduce_span<F, Max<F>>, reduce_span<F, Min<F>>,
          reduce_span<F, Prod<F>>};
}

template <DType D>
constexpr ReduceOpKernels kernels_of() {
  using F = typename FormatOf<D>::Type;
  if constexpr (is_integer(D)) {
    return integer_kernels<F>();
  } else {
    return float_kernels<F>();
  }
}

template <size_t... kDType>
constexpr Kernels all_kernels(std::index_sequence<kDType...>) {
  return {{kernels_of<static_cast<DType>(kDType)>()...}, copy_span};
}

// One source includes it at each level.  NOLINTNEXTLINE(misc-definitions-in-headers)
constexpr Kernels kKernels =
    all_kernels(std::make_index_sequence<static_cast<size_t>(DType::count)>());

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
