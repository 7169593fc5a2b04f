// Vectors, and the memory formats from which they are loaded and to which they are stored. Part of
// the templates that are compiled once for each level of vector instructions: see
// reduce_template.h.

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

// Formats: how a vector of stored elements is converted to vectors for computation, and back.
// `Bits` has unsigned lanes as wide as the lanes of `Acc`. If there are two parts, `kEvenOdd`
// states that they hold the even and the odd elements; otherwise they hold the first and the second
// half. rounded() gives the value of a lane after a store and a load.

template <typename T, typename Unsigned>
struct Plain {
  using Stored = T;
  using Acc = Vector<T>;
  using Bits = Vector<Unsigned>;
  static constexpr int kParts = 1;
  static void load(const char* from, Acc* parts) { parts[0] = load_vector<Acc>(from); }
  static void store(const Acc* parts, char* to) { store_vector(to, parts[0]); }
  static Acc rounded(const Acc& x) { return x; }
};

// The two parts are the even and the odd elements. Thus a 16-bit float is moved from and to its
// half of a 32-bit lane without a shuffle.
struct BFloat16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;
  static constexpr bool kEvenOdd = true;
  static constexpr uint32_t kHigh = 0xffff0000u;

  static void load(const char* from, Acc* parts) {
    const Bits32 pairs = load_vector<Bits32>(from);
    parts[0] = bits<Floats>(pairs << 16);
    parts[1] = bits<Floats>(pairs & kHigh);
  }
  /// NaN needs no special handling: it comes from an input or is the processor's default NaN, so
  /// its low half is zero, and rounding cannot carry out of it.
  static Bits32 round(const Acc& x) {
    const Bits32 u = bits<Bits32>(x);
    return u + 0x7fffu + ((u >> 16) & 1u);
  }
  static void store(const Acc* parts, char* to) {
    store_vector(to, (round(parts[0]) >> 16) | (round(parts[1]) & kHigh));
  }
  static Acc rounded(const Acc& x) { return bits<Acc>(round(x) & kHigh); }
};

#if COLLX_VECTOR_BYTES == 64
// These use the masked intrinsics with full masks. The unmasked ones start from an undefined
// register, which causes compiler warnings.
struct Float16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;
  static constexpr bool kEvenOdd = false;
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
  static Acc rounded(const Acc& x) {
    const __m256i half = _mm512_maskz_cvtps_ph(0xffff, bits<__m512>(x), 0);
    return bits<Acc>(_mm512_maskz_cvtph_ps(0xffff, half));
  }
};
#elif COLLX_VECTOR_BYTES == 32
struct Float16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;
  static constexpr bool kEvenOdd = false;
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
  static Acc rounded(const Acc& x) {
    return bits<Acc>(_mm256_cvtph_ps(_mm256_cvtps_ph(bits<__m256>(x), 0)));
  }
};
#else
struct Float16 {
  using Stored = uint16_t;
  using Acc = Floats;
  using Bits = Bits32;
  static constexpr int kParts = 2;
  static constexpr bool kEvenOdd = true;

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
    // Above the largest half, the carry of the rounding gives infinity up to 65536, which is the
    // limit here.
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
  static Acc rounded(const Acc& x) { return widen(narrow(x)); }
};
#endif

/// How values of a dtype are loaded, computed with and stored. A dtype without a format does not
/// compile.
template <DType D>
struct FormatOf {
  using InOrder = std::tuple<Plain<float, uint32_t>, Float16, BFloat16, Plain<double, uint64_t>,
                             Plain<int32_t, uint32_t>, Plain<int64_t, uint64_t>,
                             Plain<int8_t, uint8_t>, Plain<uint8_t, uint8_t>>;
  using Type = std::tuple_element_t<static_cast<size_t>(D), InOrder>;
};

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
