// The kernel template. Included once by each reduce_<level>.cpp, which has set the target of the
// functions that follow and defined COLLX_VECTOR_BYTES, and COLLX_SIMD_LEVEL, a namespace of its
// own: a function compiled for one level must never stand in for another's.
//
// No include guard and no includes: everything that is included here would get the target too.

namespace collx::cpu::COLLX_SIMD_LEVEL {

inline constexpr int kVectorSize = COLLX_VECTOR_BYTES;

template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorSize)));
};
template <typename T>
using Vector = typename VectorOf<T>::Type;
using Bits32 = Vector<uint32_t>;
using Floats = Vector<float>;

template <typename V>
inline __attribute__((always_inline)) V load_vector(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <typename V>
inline __attribute__((always_inline)) void store_vector(void* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof v);
}
template <typename To, typename From>
inline __attribute__((always_inline)) To bits(const From& v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &v, sizeof to);
  return to;
}

// Formats: how a vector of stored elements becomes vectors to compute with, and back. `Bits` are
// unsigned lanes as wide as the lanes of `Acc`.

template <typename T, typename Unsigned>
struct Plain {
  using Stored = T;
  using Acc = Vector<T>;
  using Bits = Vector<Unsigned>;
  static constexpr int kParts = 1;
  static void load(const char* from, Acc* parts) { parts[0] = load_vector<Acc>(from); }
  static void store(const Acc* parts, char* to) { store_vector(to, parts[0]); }
};

// Even and odd elements are the two parts: a 16-bit float is taken out of, and put into, its half
// of a 32-bit lane without any shuffle.
struct BFloat16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;
  static constexpr uint32_t kHigh = 0xffff0000u;

  static void load(const char* from, Acc* parts) {
    const Bits32 pairs = load_vector<Bits32>(from);
    parts[0] = bits<Floats>(pairs << 16);
    parts[1] = bits<Floats>(pairs & kHigh);
  }
  /// No NaN needs care: it comes from an input or is the processor's own, so its low half is zero,
  /// and rounding cannot carry out of it.
  static Bits32 round(const Acc& x) {
    const Bits32 u = bits<Bits32>(x);
    return u + 0x7fffu + ((u >> 16) & 1u);
  }
  static void store(const Acc* parts, char* to) {
    store_vector(to, (round(parts[0]) >> 16) | (round(parts[1]) & kHigh));
  }
};

#if COLLX_VECTOR_BYTES == 64
// The masked forms, with full masks: the plain ones start from an undefined register, of which
// compilers warn.
struct Float16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;
  static void load(const char* from, Acc* parts) {
    const auto* halves = reinterpret_cast<const __m256i_u*>(from);
    parts[0] = bits<Floats>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(halves)));
    parts[1] = bits<Floats>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(halves + 1)));
  }
  static void store(const Acc* parts, char* to) {
    auto* halves = reinterpret_cast<__m256i_u*>(to);
    for (int p = 0; p < kParts; ++p) {
      _mm256_storeu_si256(halves + p, _mm512_maskz_cvtps_ph(0xffff, bits<__m512>(parts[p]), 0));
    }
  }
};
#elif COLLX_VECTOR_BYTES == 32
struct Float16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;
  static void load(const char* from, Acc* parts) {
    const auto* halves = reinterpret_cast<const __m128i_u*>(from);
    parts[0] = bits<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(halves)));
    parts[1] = bits<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
  }
  static void store(const Acc* parts, char* to) {
    auto* halves = reinterpret_cast<__m128i_u*>(to);
    for (int p = 0; p < kParts; ++p) {
      _mm_storeu_si128(halves + p, _mm256_cvtps_ph(bits<__m256>(parts[p]), 0));
    }
  }
};
#else
struct Float16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;

  static Acc widen(const Bits32& half) {
    const Bits32 magnitude = half & 0x7fffu;
    const Bits32 shifted = magnitude << 13;
    // A subnormal is its mantissa times 2^-24, exact in float32.
    const Floats small =
        __builtin_convertvector(bits<Vector<int32_t>>(magnitude), Floats) * 0x1p-24f;
    const Bits32 special =
        (shifted + (224u << 23)) | (magnitude > 0x7c00u ? Bits32{} + 0x00400000u : Bits32{});
    const Bits32 finite = magnitude < 0x0400u ? bits<Bits32>(small) : shifted + (112u << 23);
    return bits<Floats>((magnitude >= 0x7c00u ? special : finite) | ((half & 0x8000u) << 16));
  }
  static Bits32 narrow(const Acc& x) {
    const Bits32 magnitude = bits<Bits32>(x) & 0x7fffffffu;
    const Bits32 nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
    // Above the largest half the carry of the rounding gives infinity up to 65536, the limit here.
    const Bits32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Adding 0.5, whose last bit is 2^-24, rounds to the grid of subnormal halves.
    const Bits32 small = bits<Bits32>(bits<Floats>(magnitude) + 0.5f) - 0x3f000000u;
    const Bits32 finite = magnitude < 0x38800000u ? small : normal;
    const Bits32 bounded = magnitude >= 0x47800000u ? Bits32{} + 0x7c00u : finite;
    return (magnitude > 0x7f800000u ? nan : bounded) | ((bits<Bits32>(x) >> 16) & 0x8000u);
  }
  static void load(const char* from, Acc* parts) {
    const Bits32 pairs = load_vector<Bits32>(from);
    parts[0] = widen(pairs & 0xffffu);
    parts[1] = widen(pairs >> 16);
  }
  static void store(const Acc* parts, char* to) {
    store_vector(to, narrow(parts[0]) | (narrow(parts[1]) << 16));
  }
};
#endif

// Operations. Integers wrap, so they are added and multiplied without a sign.

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

// Equal floats differ in bits only as zeros do, where AND gives +0 and OR gives -0. A NaN is
// unequal to everything and wins on either side.
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

// Memory. Lines that a peer has in its cache come slowly, one by one; many have to be on their way
// at once. So long arrays are walked in several places in turn, each of which a hardware
// prefetcher follows, and lines are asked for ahead, the written ones for writing.

inline constexpr int kStreams = 4;
inline constexpr uint64_t kStreamedBytes = 16 << 10;
inline constexpr int kStreamedWorld =
    4;  // more arrays than that fill the prefetchers by themselves
inline constexpr uint64_t kAhead = 256;

/// Lines apart by a power of two share a cache set, and tensors often have such sizes: places are
/// an odd number of lines apart, and kAhead lies within that.
inline uint64_t stream_bytes(uint64_t bytes) {
  const uint64_t lines = bytes / kStreams / 64;
  return (lines - (lines - 5) % 16) * 64;
}

/// Vector v of `kCount` lies at byte offset at + v * stride.
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

/// The last bytes, fewer than a vector, through a vector that ends in zeros.
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

template <typename F>
constexpr ReduceOpKernels float_kernels() {
  return {reduce_span<F, Sum<F>>, reduce_span<F, Avg<F>>, reduce_span<F, Max<F>>,
          reduce_span<F, Min<F>>, reduce_span<F, Prod<F>>};
}
template <typename T>
constexpr ReduceOpKernels integer_kernels() {
  using F = Plain<T, std::make_unsigned_t<T>>;
  return {reduce_span<F, Sum<F>>, nullptr, reduce_span<F, Max<F>>, reduce_span<F, Min<F>>,
          reduce_span<F, Prod<F>>};
}

// In the order of DType.
inline constexpr Kernels kKernels = {
    {float_kernels<Plain<float, uint32_t>>(), float_kernels<Float16>(), float_kernels<BFloat16>(),
     float_kernels<Plain<double, uint64_t>>(), integer_kernels<int32_t>(),
     integer_kernels<int64_t>(), integer_kernels<int8_t>(), integer_kernels<uint8_t>()},
    copy_span};

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
