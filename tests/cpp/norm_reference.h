// A second implementation of the contract of fused normalizations, one element at a time, following
// docs/internals/numerics.md. Unlike the kernels, it uses tables for the formats, and exact
// arithmetic in double.
#pragma once

#include <algorithm>

#include "protocol/norm.h"
#include "scalar_reference.h"

namespace collx::cpu {

inline float widened(const void* values, uint64_t i, DType dtype) {
  if (dtype == DType::float32) return static_cast<const float*>(values)[i];
  const uint16_t stored = static_cast<const uint16_t*>(values)[i];
  return dtype == DType::float16 ? HalfTraits::widen(stored) : BFloatTraits::widen(stored);
}
inline void narrow_to(void* values, uint64_t i, DType dtype, float value) {
  if (dtype == DType::float32) {
    static_cast<float*>(values)[i] = value;
  } else {
    static_cast<uint16_t*>(values)[i] =
        dtype == DType::float16 ? HalfTraits::narrow(value) : BFloatTraits::narrow(value);
  }
}
inline float rounded(float value, DType dtype) {
  float stored = 0;
  narrow_to(&stored, 0, dtype, value);
  return widened(&stored, 0, dtype);
}

/// Returns the values of the non-negative finite codes, in order.
inline std::vector<double> code_values(Quantization to) {
  std::vector<double> values;
  if (to == Quantization::int8) {
    for (int i = 0; i <= 127; ++i) values.push_back(i);
    return values;
  }
  const bool e4m3 = to == Quantization::e4m3fn;
  const int digits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, last = e4m3 ? 0x7e : 0x7b;
  for (int code = 0; code <= last; ++code) {
    const int exponent = code >> digits, mantissa = code & ((1 << digits) - 1);
    values.push_back(exponent == 0
                         ? std::ldexp(mantissa, 1 - bias - digits)
                         : std::ldexp((1 << digits) + mantissa, exponent - bias - digits));
  }
  return values;
}

/// Returns the code nearest to a value. Ties go to the even code, which has an even mantissa.
inline uint8_t nearest_code(float value, Quantization to) {
  static const std::vector<double> tables[] = {{},
                                               code_values(Quantization::e4m3fn),
                                               code_values(Quantization::e5m2),
                                               code_values(Quantization::int8)};
  const bool int8 = to == Quantization::int8;
  if (std::isnan(value)) return int8 ? 0 : 0x7f;
  const std::vector<double>& values = tables[size_t(to)];
  const double magnitude = std::min(double(std::fabs(value)), values.back());  // clamped
  const size_t above =
      size_t(std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
  size_t code = above;
  if (above > 0) {
    const double up = values[above] - magnitude, down = magnitude - values[above - 1];
    if (down < up || (down == up && (above - 1) % 2 == 0)) code = above - 1;
  }
  if (!std::signbit(value)) return uint8_t(code);
  return int8 ? uint8_t(-int(code)) : uint8_t(code | 0x80);
}

/// Returns the tree sum of a row: neighbors are added until one value is left.
inline float tree_sum(std::vector<float> values) {
  size_t size = 1;
  while (size < values.size()) size *= 2;
  values.resize(size, 0.0f);
  for (; size > 1; size /= 2) {
    for (size_t i = 0; i < size / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
  }
  return values[0];
}

/// Returns NaN if any value is NaN.
inline float largest_magnitude(const std::vector<float>& values, uint64_t from, uint64_t end) {
  float largest = 0;
  for (uint64_t j = from; j < end; ++j) {
    if (std::isnan(values[j])) return values[j];
    largest = std::max(largest, std::fabs(values[j]));
  }
  return largest;
}

struct NormResult {
  Bytes residual_out, normalized, quantized, scale;
};

class NormReference {
 public:
  NormReference(const NormOptions& options, DType dtype, uint64_t rows, uint64_t cols)
      : o_(options), dtype_(dtype), rows_(rows), cols_(cols) {
    const auto element = size_t(dtype_size(dtype));
    result_.residual_out.resize(rows * cols * element);
    result_.normalized = result_.residual_out;
    result_.quantized.resize(rows * cols);
    const uint64_t scales = o_.scale_mode == ScaleMode::tensor ? 1 : rows * groups();
    result_.scale.resize(scales * scale_bytes());
  }

  /// The pointers are the addresses of the first requested row.
  NormResult operator()(const std::vector<const char*>& inputs, const char* residual,
                        const void* weight, const void* bias, const float* given_scale) {
    weights(weight, bias);
    if (o_.scale_mode == ScaleMode::tensor && o_.quantization != Quantization::none) {
      std::memcpy(result_.scale.data(), given_scale, sizeof(float));
    }
    for (uint64_t row = 0; row < rows_; ++row) {
      const std::vector<float> acc = sums(inputs, residual, row * cols_);
      for (uint64_t j = 0; j < cols_; ++j) {
        narrow_to(result_.residual_out.data(), row * cols_ + j, dtype_, acc[j]);
      }
      std::vector<float> products;
      float norm = 0;
      const std::vector<float> y = values(acc, products, norm);
      for (uint64_t j = 0; j < cols_; ++j) {
        narrow_to(result_.normalized.data(), row * cols_ + j, dtype_, y[j]);
      }
      if (o_.quantization != Quantization::none) quantize(row, y, products, norm, given_scale);
    }
    return result_;
  }

 private:
  bool fp32() const { return o_.rounding == Rounding::fp32; }
  bool weight_parity() const { return o_.rounding == Rounding::parity_weight; }
  float to_dtype(float value) const { return rounded(value, dtype_); }
  uint64_t group() const {
    return o_.scale_mode == ScaleMode::group ? uint64_t(o_.quant_group_size) : cols_;
  }
  uint64_t groups() const { return cols_ / group(); }
  size_t scale_bytes() const {
    return o_.scale_type == ScaleType::float32          ? 4
           : o_.scale_type == ScaleType::float8_e8m0fnu ? 1
                                                        : 2;
  }

  void weights(const void* weight, const void* bias) {
    const DType stored = o_.weight_float32 ? DType::float32 : dtype_;
    for (uint64_t j = 0; j < cols_; ++j) {
      float gain = widened(weight, j, stored);
      if (o_.norm == Norm::rms) gain = gain + o_.weight_offset;
      gain_.push_back(weight_parity() ? to_dtype(gain) : gain);
      if (bias == nullptr) continue;
      const float b = widened(bias, j, stored);
      bias_.push_back(weight_parity() ? to_dtype(b) : b);
    }
  }

  std::vector<float> sums(const std::vector<const char*>& inputs, const char* residual,
                          uint64_t first) const {
    std::vector<float> acc;
    for (uint64_t j = 0; j < cols_; ++j) {
      float sum = widened(inputs[0], first + j, dtype_);
      for (size_t r = 1; r < inputs.size(); ++r) sum = sum + widened(inputs[r], first + j, dtype_);
      if (!fp32()) sum = to_dtype(sum);
      if (residual != nullptr) {
        sum = sum + widened(residual, first + j, dtype_);
        if (!fp32()) sum = to_dtype(sum);
      }
      acc.push_back(sum);
    }
    return acc;
  }

  float norm_of(const std::vector<float>& values) const {
    std::vector<float> squares;
    for (const float v : values) squares.push_back(v * v);
    return 1.0f / std::sqrt(tree_sum(squares) / float(cols_) + o_.eps);
  }

  std::vector<float> values(const std::vector<float>& acc, std::vector<float>& products,
                            float& norm) const {
    return o_.norm == Norm::rms ? rms(acc, products, norm) : layer(acc);
  }

  std::vector<float> rms(const std::vector<float>& acc, std::vector<float>& products,
                         float& norm) const {
    norm = norm_of(acc);
    std::vector<float> y;
    for (uint64_t j = 0; j < cols_; ++j) {
      products.push_back(acc[j] * gain_[j]);
      if (fp32()) y.push_back(products[j] * norm);
      if (o_.rounding == Rounding::parity) y.push_back(to_dtype(products[j] * norm));
      if (weight_parity()) y.push_back(to_dtype(to_dtype(acc[j] * norm) * gain_[j]));
    }
    return y;
  }

  std::vector<float> layer(const std::vector<float>& acc) const {
    std::vector<float> d, y;
    for (const float v : acc) d.push_back(v + 0.0f);
    const float mean = tree_sum(d) / float(cols_);
    for (uint64_t j = 0; j < cols_; ++j) d[j] = acc[j] - mean;
    const float norm = norm_of(d);
    for (uint64_t j = 0; j < cols_; ++j) {
      float v =
          weight_parity() ? to_dtype(to_dtype(d[j] * norm) * gain_[j]) : (d[j] * norm) * gain_[j];
      if (!bias_.empty()) v = v + bias_[j];
      y.push_back(fp32() ? v : to_dtype(v));
    }
    return y;
  }

  void quantize(uint64_t row, const std::vector<float>& y, const std::vector<float>& products,
                float norm, const float* given) {
    const bool by_products = o_.norm == Norm::rms && !weight_parity();
    for (uint64_t g = 0; g < cols_ / group(); ++g) {
      const uint64_t from = g * group(), end = from + group();
      float scale = 0, inverse = 0;
      if (o_.scale_mode != ScaleMode::tensor) {
        float largest = largest_magnitude(by_products ? products : y, from, end);
        if (by_products) largest = largest * norm;
        if (by_products && !fp32()) largest = to_dtype(largest);
        scale = stored(scale_of_magnitude(largest), row, g);
        inverse = 1.0f / scale;
        if (scale == 0 || !std::isfinite(inverse)) inverse = 0;
      }
      for (uint64_t j = from; j < end; ++j) {
        const float v = o_.scale_mode == ScaleMode::tensor ? y[j] / *given : y[j] * inverse;
        result_.quantized[row * cols_ + j] = char(nearest_code(v, o_.quantization));
      }
    }
  }

  float scale_of_magnitude(float largest) const {
    if (o_.scale_mode == ScaleMode::group && largest < 1e-10f) largest = 1e-10f;
    if (largest > o_.scale_ub) largest = o_.scale_ub;
    const float scale = largest / float(code_values(o_.quantization).back());
    if (!o_.ue8m0 || !(scale > 0) || !std::isfinite(scale)) return scale;
    double power = std::ldexp(1.0, -149);
    while (power < double(scale)) power *= 2;
    return float(power);
  }

  /// Stores a scale, and returns the value that a reader gets.
  float stored(float scale, uint64_t row, uint64_t g) {
    const uint64_t index =
        o_.column_major && o_.scale_mode == ScaleMode::group ? g * rows_ + row : row * groups() + g;
    void* const scales = result_.scale.data();
    if (o_.scale_type == ScaleType::float8_e8m0fnu) {
      int code = 255;  // NaN
      if (std::isfinite(scale)) {
        for (code = 0; code < 254 && std::ldexp(1.0, code - 127) < double(scale);) ++code;
      }
      static_cast<uint8_t*>(scales)[index] = uint8_t(code);
      return code == 255 ? std::nanf("") : std::ldexp(1.0f, code - 127);
    }
    const DType type = o_.scale_type == ScaleType::float16    ? DType::float16
                       : o_.scale_type == ScaleType::bfloat16 ? DType::bfloat16
                                                              : DType::float32;
    if (std::isnan(scale)) scale = std::bit_cast<float>(0x7fc00000u);
    narrow_to(scales, index, type, scale);
    return widened(scales, index, type);
  }

  NormOptions o_;
  DType dtype_;
  uint64_t rows_, cols_;
  std::vector<float> gain_, bias_;
  NormResult result_;
};

}  // namespace collx::cpu
