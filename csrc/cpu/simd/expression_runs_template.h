// Runs: float32 statements that each take the result of the previous one, so that a value stays in
// registers from its load to its store. Part of the templates that are compiled once for each level
// of vector instructions: see reduce_template.h.

#include "expression_values_template.h"

namespace collx::cpu::COLLX_SIMD_LEVEL {

/// A function call would spill the registers of a tile.
#define COLLX_HERE __attribute__((always_inline))

inline constexpr int kTileVectors = 8;
/// The number of elements whose values are in registers at once.
inline constexpr int64_t kTile = kTileVectors * kVectorSize / 4;

struct Tile {
  Floats v[kTileVectors];
};

template <typename F>
inline COLLX_HERE void each_vector(F f) {
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; ++i) f(i);
}

/// The format of consecutive elements in memory.
enum class Form : uint8_t { none, uniform, wide, bfloat16, float16 };

enum class Act : uint8_t { take, put, round, compute };

/// An operation on the value in registers.
struct Step {
  Act act;
  Do what = Do::value;     // the operation of Act::compute
  bool swapped = false;    // the value in registers is the second operand
  Form form = Form::none;  // format of the other operand or the result, or the format to round to
  int16_t line = -1;       // which operand of the line it is; if negative, `at` is its address
  uint16_t statement = 0;  // the statement whose lanes store elements that do not fill a tile
  char* at = nullptr;
  float uniform = 0;

  bool in_line() const { return line >= 0; }
  /// Whether the second operand is a uniform value that is neither NaN nor zero.
  bool is_ordinary() const {
    return form == Form::uniform && !swapped && (uniform < 0 || uniform > 0);
  }
  int64_t bytes() const { return form == Form::wide ? 4 : 2; }
};

/// Built from the bits: a floating-point sum would lose the sign of zero.
inline COLLX_HERE Floats uniform_floats(uint32_t pattern) {
  return bits<Floats>(Bits32{} + pattern);
}

/// Whether a tile may contain a NaN. If the processor has a comparison whose result can be tested
/// directly, one comparison checks two vectors.
inline COLLX_HERE bool has_nan([[maybe_unused]] const Tile& x) {
#if COLLX_VECTOR_BYTES == 64
  __mmask16 found = 0;
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; i += 2) {
    found |= _mm512_cmp_ps_mask(bits<__m512>(x.v[i]), bits<__m512>(x.v[i + 1]), _CMP_UNORD_Q);
  }
  return found != 0;
#elif COLLX_VECTOR_BYTES == 32
  __m256 found = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; i += 2) {
    found = _mm256_or_ps(
        found, _mm256_cmp_ps(bits<__m256>(x.v[i]), bits<__m256>(x.v[i + 1]), _CMP_UNORD_Q));
  }
  return _mm256_movemask_ps(found) != 0;
#else
  return true;
#endif
}

/// Replaces every NaN by the one whose low half is zero. Formats round this NaN without special
/// handling.
inline COLLX_HERE Floats with_plain_nan(const Floats& x) {
  return x != x ? uniform_floats(0x7fc00000u) : x;
}

template <typename F>
inline COLLX_HERE void load_tile(Tile& to, const char* from) {
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; i += F::kParts) {
    F::load(from + i / F::kParts * kVectorSize, to.v + i);
  }
}
template <typename F>
inline COLLX_HERE void store_tile(Tile from, char* to) {
  if (F::kParts > 1 && has_nan(from)) {
    each_vector([&](int v) COLLX_HERE { from.v[v] = with_plain_nan(from.v[v]); });
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTileVectors; i += F::kParts) {
    F::store(from.v + i, to + i / F::kParts * kVectorSize);
  }
}

inline COLLX_HERE void load_tile(Tile& to, const Step& s, int64_t i) {
  switch (s.form) {
    case Form::none: return;
    case Form::uniform: {
      const Floats all = uniform_floats(std::bit_cast<uint32_t>(s.uniform));
      each_vector([&](int v) COLLX_HERE { to.v[v] = all; });
      return;
    }
    case Form::wide: return load_tile<Plain<float, uint32_t>>(to, s.at + 4 * i);
    case Form::bfloat16: return load_tile<BFloat16>(to, s.at + 2 * i);
    case Form::float16: return load_tile<Float16>(to, s.at + 2 * i);
  }
}

/// Runs all steps for each tile. The destination of the last step may be the source of any step,
/// element by element, since only the last step stores to a tensor.
inline void run_tiles(const Step* first, const Step* last, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; i += kTile) {
    Tile made{};
    for (const Step* s = first; s != last; ++s) {
      switch (s->act) {
        case Act::take: load_tile(made, *s, i); break;
        case Act::put:
          if (s->form == Form::wide) store_tile<Plain<float, uint32_t>>(made, s->at + 4 * i);
          if (s->form == Form::bfloat16) store_tile<BFloat16>(made, s->at + 2 * i);
          if (s->form == Form::float16) store_tile<Float16>(made, s->at + 2 * i);
          break;
        case Act::round:
          each_vector([&](int v) COLLX_HERE {
            const Floats x = with_plain_nan(made.v[v]);
            made.v[v] = s->form == Form::bfloat16 ? BFloat16::rounded(x) : Float16::rounded(x);
          });
          break;
        case Act::compute: {
          Tile other{};
          load_tile(other, *s, i);
          if (s->swapped) {
            each_vector([&](int v) COLLX_HERE {
              const Floats x = made.v[v];
              made.v[v] = other.v[v];
              other.v[v] = x;
            });
          }
          with_function(s->what, s->is_ordinary(), [&](auto f) COLLX_HERE {
            each_vector([&](int v) COLLX_HERE { made.v[v] = f(made.v[v], other.v[v]); });
          });
        }
      }
    }
  }
}

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
