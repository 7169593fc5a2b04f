// The options of a fused normalization, and the arithmetic of a row's scale, which both devices
// share. docs/internals/numerics.md specifies the numerics.
#pragma once

#include "types.h"

#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace collx {

enum class Norm : uint8_t { rms, layer };

/// Whether rows of this dtype can be normalized.
COLLX_HD constexpr bool can_normalize(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

/// Where values are rounded to the dtype. fp32 rounds once, at the end. The parity modes round
/// where the unfused model does: parity multiplies the weight in float32 (torch.nn.RMSNorm),
/// parity_weight in the dtype (LlamaRMSNorm).
enum class Rounding : uint8_t { fp32, parity, parity_weight, count };

enum class Quantization : uint8_t { none, e4m3fn, e5m2, int8 };

/// One scale for each row, one given scale for the whole tensor, or one scale for each group of
/// columns.
enum class ScaleMode : uint8_t { row, tensor, group, count };

/// The calls that models make most often, all with a residual. The other result is either the
/// normalized values, with one of the three roundings, or e4m3fn bytes, rounded once, with a scale
/// for each row or a given scale.
enum class CommonNorm : uint8_t {
  other,
  values,
  parity,
  parity_weight,
  e4m3fn_row,
  e4m3fn_tensor,
  count
};
constexpr CommonNorm common_values(Rounding rounding) {
  switch (rounding) {
    case Rounding::fp32: return CommonNorm::values;
    case Rounding::parity: return CommonNorm::parity;
    case Rounding::parity_weight: return CommonNorm::parity_weight;
    case Rounding::count: break;
  }
  return CommonNorm::other;
}

/// The features that take most of a kernel's code. A specialized kernel can omit them.
struct NormForm {
  bool layer = false;   // layer norm
  bool groups = false;  // scales of groups
  bool steps = false;   // rows that take more than one step
  CommonNorm common = CommonNorm::other;

  friend bool operator==(const NormForm&, const NormForm&) = default;
};

/// How scales are stored.
enum class ScaleType : uint8_t { float32, float16, bfloat16, float8_e8m0fnu };

inline constexpr int kSmallestGroup = 16;
inline constexpr int kLargestGroup = 4096;

struct NormOptions {
  Norm norm = Norm::rms;
  Rounding rounding = Rounding::fp32;
  Quantization quantization = Quantization::none;
  ScaleMode scale_mode = ScaleMode::row;
  ScaleType scale_type = ScaleType::float32;
  bool ue8m0 = false;            // scales are rounded up to powers of two
  bool column_major = false;     // scales of groups are stored in column-major order
  bool weight_float32 = false;   // weight and bias are float32, not of the input's dtype
  int32_t quant_group_size = 0;  // columns that share a scale, with ScaleMode::group
  float eps = 0;                 // as added; with Rounding::fp32 already rounded to the dtype
  float weight_offset = 0;       // as added; already rounded to the dtype
  float scale_ub = 0;            // infinity: none
};

static_assert(sizeof(NormOptions) == 24, "no byte is padding: fingerprints take them all");

COLLX_HD constexpr uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
COLLX_HD constexpr float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline constexpr uint32_t kNaNBits = 0x7FC00000u;  // the only NaN that a scale can have
inline constexpr uint32_t kInfinityBits = 0x7F800000u;

COLLX_HD constexpr bool is_nan(float value) {
  return (bits_of(value) & 0x7FFFFFFFu) > kInfinityBits;
}

/// Magnitudes are compared by their bits, as unsigned integers. This is the order of the floats
/// with NaN above infinity, so that a maximum propagates NaN.
COLLX_HD constexpr uint32_t magnitude(float value) { return bits_of(value) & 0x7FFFFFFFu; }

COLLX_HD constexpr float largest_value(Quantization q) {
  return q == Quantization::e4m3fn ? 448.0f : q == Quantization::e5m2 ? 57344.0f : 127.0f;
}

/// Clamps to [-limit, limit] and preserves NaN, which fminf and fmaxf would drop.
COLLX_HD constexpr float clamp(float value, float limit) {
  return value > limit ? limit : value < -limit ? -limit : value;
}

/// The bits of the nearest fp8 value, ties to even. Values out of range are clamped; NaN becomes
/// 0x7F.
template <Quantization To>
COLLX_HD constexpr uint32_t to_fp8_bits(float value) {
  static_assert(To == Quantization::e4m3fn || To == Quantization::e5m2);
  constexpr bool kE4m3 = To == Quantization::e4m3fn;
  constexpr int kDropped = kE4m3 ? 20 : 21;  // bits of the mantissa
  constexpr uint32_t kRebias = (kE4m3 ? 127 - 7 : 127 - 15) << 23;
  constexpr float kLeastNormal = kE4m3 ? 0x1p-6f : 0x1p-14f;
  constexpr float kGrid = kE4m3 ? 0x1p14f : 0x1p7f;  // its last bit is the unit of subnormals
  if (is_nan(value)) return 0x7Fu;
  const uint32_t sign = bits_of(value) >> 24 & 0x80u;
  const float size = clamp(float_of(magnitude(value)), largest_value(To));
  if (size < kLeastNormal) return sign | (bits_of(size + kGrid) - bits_of(kGrid));
  const uint32_t bits = bits_of(size);
  return sign |
         (bits + ((1u << (kDropped - 1)) - 1u) + (bits >> kDropped & 1u) - kRebias) >> kDropped;
}

/// The smallest power of two that is not below a positive float. 0, infinity and NaN are unchanged.
COLLX_HD constexpr float power_of_two_above(float value) {
  const uint32_t bits = bits_of(value);
  if (bits == 0 || bits >= kInfinityBits) return value;
  if (bits >= 0x00800000u) return float_of((bits + 0x007FFFFFu) & 0xFF800000u);
  uint32_t power = 1;  // subnormals: the bits are the value in units of the smallest one
  while (power < bits) power <<= 1;
  return float_of(power);
}

/// The bits of a float rounded to bfloat16, nearest even, in the upper 16 bits. Not for NaN.
COLLX_HD constexpr uint32_t round_to_bfloat16(uint32_t bits) {
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
}

/// The bits of the nearest float16, ties to even, of a float that is neither negative nor NaN.
COLLX_HD constexpr uint32_t to_float16_bits(float value) {
  const uint32_t bits = bits_of(value);
  if (bits >= 0x47800000u) return 0x7C00u;  // 65536 and above
  if (bits < 0x38800000u) {                 // below 2^-14: subnormal or zero
    // Adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the addition.
    return bits_of(value + 0.5f) - bits_of(0.5f);
  }
  const uint32_t rounded = bits + 0xFFFu + (bits >> 13 & 1u);
  return (rounded - 0x38000000u) >> 13;
}

COLLX_HD constexpr float from_float16_bits(uint32_t half) {
  const uint32_t exponent = half >> 10 & 31u, mantissa = half & 1023u;
  if (exponent == 31) return float_of(kInfinityBits | mantissa << 13);
  if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-24f;
  return float_of((exponent + 112) << 23 | mantissa << 13);
}

/// The exponent as which a power of two is stored. Values below 2^-127 become 2^-127; infinity and
/// NaN become the single NaN of the format.
COLLX_HD constexpr uint8_t to_e8m0(float power) {
  return static_cast<uint8_t>((bits_of(power) & 0x7FFFFFFFu) >> 23);
}
COLLX_HD constexpr float from_e8m0(uint8_t code) {
  if (code == 255) return float_of(kNaNBits);
  return code == 0 ? 0x1p-127f : float_of(static_cast<uint32_t>(code) << 23);
}

/// The value that a reader of the stored scale obtains.
COLLX_HD constexpr float round_scale(float scale, ScaleType type) {
  if (is_nan(scale)) return float_of(kNaNBits);
  switch (type) {
    case ScaleType::float16: return from_float16_bits(to_float16_bits(scale));
    case ScaleType::bfloat16: return float_of(round_to_bfloat16(bits_of(scale)));
    case ScaleType::float8_e8m0fnu: return from_e8m0(to_e8m0(scale));
    case ScaleType::float32: break;
  }
  return scale;
}

/// The stored form of a scale that round_scale() returned.
COLLX_HD constexpr uint32_t stored_scale(float scale, ScaleType type) {
  switch (type) {
    case ScaleType::float16: return is_nan(scale) ? 0x7E00u : to_float16_bits(scale);
    case ScaleType::bfloat16: return bits_of(scale) >> 16;
    case ScaleType::float8_e8m0fnu: return is_nan(scale) ? 255u : to_e8m0(scale);
    case ScaleType::float32: break;
  }
  return bits_of(scale);
}

COLLX_HD constexpr uint32_t scale_bytes(ScaleType type) {
  return type == ScaleType::float32 ? 4 : type == ScaleType::float8_e8m0fnu ? 1 : 2;
}

/// Divides many values by one divisor. The result has the same bits as `/` for every quotient that
/// quantization distinguishes from zero and from its largest value. The reciprocal gives an
/// estimate, which is corrected twice by its remainder. The second correction rounds as `/` does,
/// since a fused multiply-add computes the remainder exactly (Markstein, IBM J. Res. Dev. 34,
/// 1990). For quotients far from 1 the remainder might not be exact, and the estimate is good
/// enough.
class Divisor {
 public:
  COLLX_HD explicit Divisor(float divisor)
      : shift_(magnitude(divisor) < bits_of(0x1p-40f)  ? 0x1p100f
               : magnitude(divisor) > bits_of(0x1p40f) ? 0x1p-84f
                                                       : 1.0f),
        divisor_(divisor * shift_),
        inverse_(1.0f / divisor_) {}

  COLLX_HD float divide(float value) const {
    value = value * shift_;
    const float estimate = value * inverse_;
    const float quotient = corrected(corrected(estimate, value), value);
    const uint32_t size = magnitude(estimate);
    return size > bits_of(0x1p-40f) && size < bits_of(0x1p40f) ? quotient : estimate;
  }

 private:
  COLLX_HD float corrected(float quotient, float value) const {
    return fmaf(fmaf(-quotient, divisor_, value), inverse_, quotient);
  }

  float shift_;  // a power of two that keeps the divisor in the middle of the exponent range
  float divisor_, inverse_;
};

/// The scale of quantized values. Values are multiplied by `inverse`, or divided by `scale` if it
/// is given for the whole tensor.
struct Scale {
  float scale;
  float inverse;
};

/// The scale of a row or group whose largest magnitude is `largest`, as magnitude() gives it.
COLLX_HD constexpr Scale scale_of(uint32_t largest, const NormOptions& o) {
  if (o.scale_mode == ScaleMode::group && largest < bits_of(1e-10f)) largest = bits_of(1e-10f);
  float bound = float_of(largest);
  if (bound > o.scale_ub) bound = o.scale_ub;
  float scale = bound / largest_value(o.quantization);
  if (o.ue8m0) scale = power_of_two_above(scale);
  scale = round_scale(scale, o.scale_type);
  const float inverse = scale == 0 ? 0 : 1.0f / scale;
  return {scale, magnitude(inverse) >= kInfinityBits ? 0 : inverse};
}

}  // namespace collx
