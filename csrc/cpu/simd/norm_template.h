// The kernels of fused normalizations. Part of the templates that are compiled once for each level
// of vector instructions: see reduce_template.h.

#include "formats_template.h"

namespace collx::cpu::COLLX_SIMD_LEVEL {

#define COLLX_INLINE inline __attribute__((always_inline))

inline constexpr int kLanes = kVectorSize / 4;
inline constexpr uint64_t kPair = 2 * kLanes;   // elements of two vectors, which are stored at once
inline constexpr uint64_t kBlock = 8 * kLanes;  // elements whose subtree is summed at once

using Ints = Vector<int32_t>;
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Codes __attribute__((vector_size(kLanes)));

// Shuffles of two vectors. Lane numbers continue from the first vector to the second one.

template <int... kFrom>
COLLX_INLINE Floats pick(const Floats& a, const Floats& b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  return __builtin_shuffle(a, b, Ints{kFrom...});
#endif
}
template <int... kLane>
struct Shuffles {
  static constexpr int kHalf = kLanes / 2;
  static COLLX_INLINE Floats evens(const Floats& a, const Floats& b) {
    return pick<2 * kLane...>(a, b);
  }
  static COLLX_INLINE Floats odds(const Floats& a, const Floats& b) {
    return pick<2 * kLane + 1 ...>(a, b);
  }
  /// a0 b0 a1 b1 ...: the first and the second vector of this sequence.
  static COLLX_INLINE Floats zip_low(const Floats& a, const Floats& b) {
    return pick<kLane / 2 + kLane % 2 * kLanes...>(a, b);
  }
  static COLLX_INLINE Floats zip_high(const Floats& a, const Floats& b) {
    return pick<kHalf + kLane / 2 + kLane % 2 * kLanes...>(a, b);
  }
};
template <int... kLane>
Shuffles<kLane...> shuffles_of(std::integer_sequence<int, kLane...>);
using Shuffle = decltype(shuffles_of(std::make_integer_sequence<int, kLanes>()));

// Loads and stores of elements in memory order.

template <typename F>
inline constexpr uint64_t kPairBytes = kPair * sizeof(typename F::Stored);

template <typename F>
COLLX_INLINE void load_pair(const char* from, Floats* two) {
  if constexpr (F::kParts == 1) {
    F::load(from, two);
    F::load(from + kVectorSize, two + 1);
  } else if constexpr (!F::kEvenOdd) {
    F::load(from, two);
  } else {
    Floats parts[2];
    F::load(from, parts);
    two[0] = Shuffle::zip_low(parts[0], parts[1]);
    two[1] = Shuffle::zip_high(parts[0], parts[1]);
  }
}
template <typename F>
COLLX_INLINE void store_pair(const Floats* two, char* to) {
  if constexpr (F::kParts == 1) {
    F::store(two, to);
    F::store(two + 1, to + kVectorSize);
  } else if constexpr (!F::kEvenOdd) {
    F::store(two, to);
  } else {
    const Floats parts[2] = {Shuffle::evens(two[0], two[1]), Shuffle::odds(two[0], two[1])};
    F::store(parts, to);
  }
}

// Sums over the ranks.

inline constexpr uint64_t kNormAhead = 512;  // bytes; cache lines of peers have a high latency

template <typename F, bool kRounded>
COLLX_INLINE void sum_pair(const NormPiece& p, uint64_t at) {
  const uint64_t byte = at * sizeof(typename F::Stored);
  Floats acc[2], next[2];
  load_pair<F>(static_cast<const char*>(p.inputs[0]) + byte, acc);
  for (int rank = 1; rank < p.world; ++rank) {
    const char* const input = static_cast<const char*>(p.inputs[rank]) + byte;
    __builtin_prefetch(input + kNormAhead);
    load_pair<F>(input, next);
    for (int v = 0; v < 2; ++v) acc[v] = acc[v] + next[v];
  }
  if constexpr (kRounded) {
    for (int v = 0; v < 2; ++v) acc[v] = F::rounded(acc[v]);
  }
  if (p.residual != nullptr) {
    load_pair<F>(static_cast<const char*>(p.residual) + byte, next);
    for (int v = 0; v < 2; ++v) acc[v] = acc[v] + next[v];
    if constexpr (kRounded) {
      for (int v = 0; v < 2; ++v) acc[v] = F::rounded(acc[v]);
    }
  }
  for (int v = 0; v < 2; ++v) store_vector(p.sums + at + v * kLanes, acc[v]);
  if (p.residual_out != nullptr) store_pair<F>(acc, static_cast<char*>(p.residual_out) + byte);
}

/// The last elements, fewer than a pair of vectors, through arrays that are padded with zeros.
template <typename F, bool kRounded>
void sum_tail(const NormPiece& p, uint64_t at) {
  const uint64_t byte = at * sizeof(typename F::Stored);
  const uint64_t bytes = (p.count - at) * sizeof(typename F::Stored);
  char inputs[kMaxRanks][kPairBytes<F>], residual[kPairBytes<F>] = {}, out[kPairBytes<F>];
  float sums[kPair];
  const void* sources[kMaxRanks] = {};
  for (int rank = 0; rank < p.world; ++rank) {
    __builtin_memset(inputs[rank], 0, kPairBytes<F>);
    __builtin_memcpy(inputs[rank], static_cast<const char*>(p.inputs[rank]) + byte, bytes);
    sources[rank] = inputs[rank];
  }
  if (p.residual != nullptr) {
    __builtin_memcpy(residual, static_cast<const char*>(p.residual) + byte, bytes);
  }
  sum_pair<F, kRounded>({sources, p.world, p.residual == nullptr ? nullptr : residual, sums,
                         p.residual_out == nullptr ? nullptr : out, kPair},
                        0);
  __builtin_memcpy(p.sums + at, sums, (p.count - at) * sizeof(float));
  if (p.residual_out != nullptr) {
    __builtin_memcpy(static_cast<char*>(p.residual_out) + byte, out, bytes);
  }
}

template <typename F, bool kRounded>
void sum_piece(const NormPiece& p) {
  uint64_t at = 0;
  for (; at + kPair <= p.count; at += kPair) sum_pair<F, kRounded>(p, at);
  if (at < p.count) sum_tail<F, kRounded>(p, at);
}

/// Replaces NaN by one without low bits, like every NaN that comes from a 16-bit float: rounding a
/// NaN of all ones to bfloat16 would carry out of it. Every later NaN derives from such a NaN.
template <typename F>
void prepare(float* values, uint64_t count, float offset, bool rounded) {
  for (uint64_t at = 0; at < count; at += kLanes) {
    Floats v = load_vector<Floats>(values + at) + offset;
    v = v == v ? v : bits<Floats>(Bits32{} + kNaNBits);
    store_vector(values + at, rounded ? F::rounded(v) : v);
  }
}

// The tree over the row: neighbors are added until one sum is left.

/// The sums of neighbors, in order.
COLLX_INLINE Floats add_neighbors(const Floats& a, const Floats& b) {
  return Shuffle::evens(a, b) + Shuffle::odds(a, b);
}

/// Writes zeros up to a multiple of `unit`, and returns it.
inline uint64_t put_zeros_behind(float* values, uint64_t count, uint64_t unit) {
  const uint64_t end = (count + unit - 1) / unit * unit;
  __builtin_memset(values + count, 0, (end - count) * sizeof(float));
  return end;
}

/// The tree over `count` elements. It writes the zeros after them. No element may be -0.
inline float sum_of_neighbors(float* values, uint64_t count) {
  while (count > kPair) {
    const uint64_t end = put_zeros_behind(values, count, kPair);
    for (uint64_t at = 0; at < end / 2; at += kLanes) {
      const float* const from = values + 2 * at;
      const Floats sums =
          add_neighbors(load_vector<Floats>(from), load_vector<Floats>(from + kLanes));
      store_vector(values + at, sums);
    }
    count = (count + 1) / 2;
  }
  put_zeros_behind(values, count, kPair);
  Floats sums = add_neighbors(load_vector<Floats>(values), load_vector<Floats>(values + kLanes));
  for (int left = kLanes; left > 1; left /= 2) sums = add_neighbors(sums, Floats{});
  return sums[0];
}

/// The tree over map(value) for a row that is padded with zeros, which map to zeros.
template <typename Map>
COLLX_INLINE float tree(const NormRow& row, Map map) {
  const uint64_t blocks = (row.cols + kBlock - 1) / kBlock;
  for (uint64_t b = 0; b < blocks; ++b) {
    Floats v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      v[i] = map(load_vector<Floats>(row.values + b * kBlock + i * kLanes));
    }
#pragma GCC unroll 3
    for (int left = 4; left > 0; left /= 2) {
#pragma GCC unroll 4
      for (int i = 0; i < left; ++i) v[i] = add_neighbors(v[2 * i], v[2 * i + 1]);
    }
    store_vector(row.tree + b * kLanes, v[0]);
  }
  return sum_of_neighbors(row.tree, blocks * kLanes);
}

// The steps of a row. Each processes whole vectors, in place. It keeps zeros after the row if the
// next step needs them.

template <typename Map>
COLLX_INLINE void map_values(const NormRow& row, Map map) {
  for (uint64_t at = 0; at < row.cols; at += kLanes) {
    store_vector(row.values + at, map(load_vector<Floats>(row.values + at), at));
  }
  put_zeros_behind(row.values, row.cols, kBlock);
}

inline float inverse_root(float squares, const NormRow& row) {
  const float mean = squares / static_cast<float>(row.cols);
  const float norm = 1.0f / __builtin_sqrtf(mean + row.options->eps);
  return is_nan(norm) ? float_of(kNaNBits) : norm;
}

/// The final value: the product with the weight times the norm factor, or the value itself times 1.
/// Rounding an already rounded value does not change it.
template <typename F, bool kRounded>
struct Last {
  float factor;
  COLLX_INLINE Floats operator()(const Floats& v) const {
    const Floats y = v * factor;
    if constexpr (kRounded) return F::rounded(y);
    return y;
  }
};

// The operations on each value. They are not lambdas, because lambdas would not get the target of
// their enclosing function.

struct Square {
  COLLX_INLINE Floats operator()(const Floats& v) const { return v * v; }
};
struct WithoutNegativeZero {
  COLLX_INLINE Floats operator()(const Floats& v) const { return v + 0.0f; }
};
struct Center {
  float mean;
  COLLX_INLINE Floats operator()(const Floats& v, uint64_t) const { return v - mean; }
};
struct Gain {
  const float* gain;
  COLLX_INLINE Floats operator()(const Floats& v, uint64_t at) const {
    return v * load_vector<Floats>(gain + at);
  }
};
/// As in the unfused model, the weight multiplies rounded values.
template <typename F, bool kRounded>
struct NormAndGain {
  float norm;
  const float* gain;
  const float* bias;
  COLLX_INLINE Floats operator()(const Floats& v, uint64_t at) const {
    Floats y = v * norm;
    if constexpr (kRounded) y = F::rounded(y);
    y = y * load_vector<Floats>(gain + at);
    if constexpr (kRounded) y = F::rounded(y);
    return bias == nullptr ? y : y + load_vector<Floats>(bias + at);
  }
};

/// RMS norm. Returns the factor that Last applies.
template <typename F, Rounding kRounding>
float weigh_rms(const NormRow& row) {
  const float norm = inverse_root(tree(row, Square{}), row);
  if constexpr (kRounding != Rounding::parity_weight) {
    map_values(row, Gain{row.gain});
    return norm;
  }
  map_values(row, NormAndGain<F, true>{norm, row.gain, nullptr});
  return 1;
}

/// The same for layer norm.
template <typename F, Rounding kRounding>
float weigh_layer(const NormRow& row) {
  map_values(row, Center{tree(row, WithoutNegativeZero{}) / static_cast<float>(row.cols)});
  const float norm = inverse_root(tree(row, Square{}), row);
  constexpr bool kRounded = kRounding == Rounding::parity_weight;
  map_values(row, NormAndGain<F, kRounded>{norm, row.gain, row.bias});
  return 1;
}

// Results.

template <typename F, typename LastOf>
void store_normalized(const NormRow& row, const LastOf& last, void* to_row) {
  char* const out = static_cast<char*>(to_row);
  for (uint64_t at = 0; at < row.cols; at += kPair) {
    Floats two[2];
    for (int v = 0; v < 2; ++v) two[v] = last(load_vector<Floats>(row.values + at + v * kLanes));
    char* const to = out + at * sizeof(typename F::Stored);
    if (at + kPair <= row.cols) {
      store_pair<F>(two, to);
    } else {
      char tail[kPairBytes<F>];
      store_pair<F>(two, tail);
      __builtin_memcpy(to, tail, (row.cols - at) * sizeof(typename F::Stored));
    }
  }
}

/// The largest magnitude, in the format of magnitude(). It reads whole vectors.
inline uint32_t largest_of(const float* values, uint64_t count) {
  Ints largest{};
  for (uint64_t at = 0; at < count; at += kLanes) {
    const Ints next = bits<Ints>(load_vector<Floats>(values + at)) & 0x7fffffff;
    largest = next > largest ? next : largest;
  }
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (largest[lane] > result) result = largest[lane];
  }
  return static_cast<uint32_t>(result);
}

/// Clamps to -limit .. limit. NaN stays NaN: see clamp() in norm.h.
COLLX_INLINE Floats clamped(const Floats& v, float limit) {
  const Floats high = Floats{} + limit, low = -high;
  return v > high ? high : v < low ? low : v;
}

/// The codes of clamped values, one in each lane, rounded to nearest even.
template <Quantization kTo>
COLLX_INLINE Bits32 encoded(const Floats& v) {
  if constexpr (kTo == Quantization::int8) {
    // The addition puts the integer into the low bits.
    const Bits32 code = bits<Bits32>(v + 0x1.8p23f) & 0xffu;
    return v == v ? code : Bits32{};
  }
  constexpr bool kE4m3 = kTo == Quantization::e4m3fn;
  constexpr int kDropped = kE4m3 ? 20 : 21;  // bits of the mantissa
  constexpr uint32_t kRebias = (kE4m3 ? 127 - 7 : 127 - 15) << 23;
  constexpr float kLeastNormal = kE4m3 ? 0x1p-6f : 0x1p-14f;
  // The last bit of kGrid is the unit of subnormal codes.
  constexpr float kGrid = kE4m3 ? 0x1p14f : 0x1p7f;
  const Bits32 magnitude = bits<Bits32>(v) & 0x7fffffffu;
  const Bits32 odd = (magnitude >> kDropped) & 1u;
  const Bits32 normal = (magnitude + ((1u << (kDropped - 1)) - 1u) + odd - kRebias) >> kDropped;
  const Bits32 small = bits<Bits32>(bits<Floats>(magnitude) + kGrid) - bits_of(kGrid);
  const Bits32 finite = bits<Floats>(magnitude) < kLeastNormal ? small : normal;
  const Bits32 sign = (bits<Bits32>(v) >> 24) & 0x80u;
  return v == v ? finite | sign : Bits32{} + 0x7fu;
}

/// The scaling of values before the conversion.
template <typename LastOf>
struct Divided {
  const float* values;
  LastOf last;
  float scale;
  COLLX_INLINE Floats operator()(uint64_t at) const {
    return last(load_vector<Floats>(values + at)) / scale;
  }
};
template <typename LastOf>
struct Multiplied {
  const float* values;
  LastOf last;
  float inverse;
  COLLX_INLINE Floats operator()(uint64_t at) const {
    return last(load_vector<Floats>(values + at)) * inverse;
  }
};

template <Quantization kTo, typename ValueOf>
COLLX_INLINE void store_codes(char* to, uint64_t from, uint64_t end, const ValueOf& value) {
  for (uint64_t at = from; at < end; at += kLanes) {
    const Floats v = clamped(value(at), largest_value(kTo));
    // Converts in two steps: if one step has no instruction, compilers convert the lanes one by
    // one.
    const Halves halves = __builtin_convertvector(encoded<kTo>(v), Halves);
    const Codes codes = __builtin_convertvector(halves, Codes);
    const uint64_t count = end - at < kLanes ? end - at : kLanes;
    if (count == kLanes) {
      __builtin_memcpy(to + at, &codes, kLanes);
    } else {
      __builtin_memcpy(to + at, &codes, count);
    }
  }
}

template <Quantization kTo, typename LastOf>
void quantize_by_given(const NormRow& row, const LastOf& last) {
  if (row.quantized == nullptr) return;
  const Divided<LastOf> value{row.values, last, row.given_scale};
  store_codes<kTo>(row.quantized, 0, row.cols, value);
}

/// One scale for each group of columns. A group may be the whole row.
template <Quantization kTo, typename LastOf>
void quantize_groups(const NormRow& row, uint64_t group, const LastOf& last) {
  const NormOptions& o = *row.options;
  char* scales = row.scales;
  for (uint64_t from = 0; from < row.cols; from += group) {
    const uint64_t end = from + group < row.cols ? from + group : row.cols;
    const uint32_t largest = largest_of(row.values + from, end - from);
    const Floats bound = last(Floats{} + float_of(largest));
    const Scale scale = scale_of(magnitude(bound[0]), o);
    if (scales != nullptr) {
      const uint32_t stored = stored_scale(scale.scale, o.scale_type);
      __builtin_memcpy(scales, &stored, scale_bytes(o.scale_type));
      scales += row.scale_stride;
    }
    if (row.quantized == nullptr) continue;
    const Multiplied<LastOf> value{row.values, last, scale.inverse};
    store_codes<kTo>(row.quantized, from, end, value);
  }
}

template <Quantization kTo, typename LastOf>
void quantize(const NormRow& row, const LastOf& last) {
  const NormOptions& o = *row.options;
  if (o.scale_mode == ScaleMode::tensor) return quantize_by_given<kTo>(row, last);
  const bool grouped = o.scale_mode == ScaleMode::group;
  quantize_groups<kTo>(row, grouped ? static_cast<uint64_t>(o.quant_group_size) : row.cols, last);
}

template <typename F, typename LastOf>
void quantize_as_asked(const NormRow& row, const LastOf& last) {
  switch (row.options->quantization) {
    case Quantization::e4m3fn: return quantize<Quantization::e4m3fn>(row, last);
    case Quantization::e5m2: return quantize<Quantization::e5m2>(row, last);
    case Quantization::int8: return quantize<Quantization::int8>(row, last);
    case Quantization::none: return;
  }
}

/// With an epilogue, its results are quantized, rounded as they are stored.
template <typename F>
void map_row(const NormRow& row) {
  const void* const mapped = row.line.data[0];
  row.evaluate(*row.epilogue, row.line);
  if (row.options->quantization == Quantization::none) return;
  const NormPiece whole{&mapped, 1, nullptr, row.values, nullptr, row.cols};
  sum_piece<F, false>(whole);
  put_zeros_behind(row.values, row.cols, kBlock);
  quantize_as_asked<F>(row, Last<F, false>{1});
}

template <typename F, Rounding kRounding>
void finish_as(const NormRow& row) {
  put_zeros_behind(row.values, row.cols, kBlock);
  const Last<F, kRounding != Rounding::fp32> last{row.options->norm == Norm::rms
                                                      ? weigh_rms<F, kRounding>(row)
                                                      : weigh_layer<F, kRounding>(row)};
  if (row.epilogue != nullptr) {
    store_normalized<F>(row, last, row.line.data[0]);
    return map_row<F>(row);
  }
  if (row.normalized != nullptr) store_normalized<F>(row, last, row.normalized);
  quantize_as_asked<F>(row, last);
}

template <typename F>
void finish(const NormRow& row) {
  switch (row.options->rounding) {
    case Rounding::parity: return finish_as<F, Rounding::parity>(row);
    case Rounding::parity_weight: return finish_as<F, Rounding::parity_weight>(row);
    case Rounding::fp32: return finish_as<F, Rounding::fp32>(row);
    case Rounding::count: break;
  }
}

template <typename F>
constexpr NormKernels norm_kernels_of() {
  return {sum_piece<F, false>, sum_piece<F, true>, prepare<F>, finish<F>};
}

template <size_t... kDType>
constexpr NormKernelTable all_norm_kernels(std::index_sequence<kDType...>) {
  return {norm_kernels_of<typename FormatOf<static_cast<DType>(kDType)>::Type>()...};
}

// One source includes it at each level.  NOLINTNEXTLINE(misc-definitions-in-headers)
constexpr NormKernelTable kNormKernels =
    all_norm_kernels(std::make_index_sequence<NormKernelTable().size()>());

#undef COLLX_INLINE

}  // namespace collx::cpu::COLLX_SIMD_LEVEL
