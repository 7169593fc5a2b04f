// Calls of fused normalizations, their data, and a comparison of everything that they write.
#pragma once

#include <gtest/gtest.h>

#include <random>

#include "cpu/calls.h"
#include "cpu_ranks.h"
#include "forms.h"
#include "norm_reference.h"

namespace collx::cpu {

inline constexpr DType kNormDTypes[] = {DType::float32, DType::float16, DType::bfloat16};

struct NormCase {
  Collective collective = Collective::allreduce_rmsnorm;
  DType dtype = DType::bfloat16;
  uint64_t rows = 2;
  uint64_t cols = 384;
  NormOptions options;
  bool residual = false;
  bool normalized = true;
  uint64_t seed = 0;

  size_t element() const { return size_t(dtype_size(dtype)); }
  uint64_t numel() const { return rows * cols; }
  bool quantizes() const { return options.quantization != Quantization::none; }
  DType weight_dtype() const { return options.weight_float32 ? DType::float32 : dtype; }
};

inline std::string describe(const NormCase& c) {
  const NormOptions& o = c.options;
  return std::string(name_of(c.collective)) + " " + std::string(name_of(c.dtype)) + " [" +
         std::to_string(c.rows) + ", " + std::to_string(c.cols) + "] norm " +
         std::to_string(int(o.norm)) + " rounding " + std::to_string(int(o.rounding)) +
         " quantization " + std::to_string(int(o.quantization)) + " scales " +
         std::to_string(int(o.scale_mode)) + "/" + std::to_string(int(o.scale_type)) +
         (o.ue8m0 ? " ue8m0" : "") + (o.column_major ? " column" : "") +
         (o.weight_float32 ? " weight_float32" : "") + (c.residual ? " residual" : "") + " seed " +
         std::to_string(c.seed);
}

/// The number of bytes around every tensor that no kernel reads or writes.
inline constexpr uint64_t kNormGuard = 192;
inline constexpr char kNormCanary = char(0xc3);

/// A tensor between canaries. Its address is only aligned to its elements.
class Guarded {
 public:
  Guarded() = default;
  Guarded(uint64_t bytes, uint64_t shift)
      : start_(kNormGuard + shift),
        bytes_(bytes),
        all_(bytes + 2 * kNormGuard + shift, kNormCanary) {}
  char* get() { return all_.data() + start_; }
  bool written_outside() const {
    for (uint64_t i = 0; i < all_.size(); ++i) {
      if ((i < start_ || i >= start_ + bytes_) && all_[i] != kNormCanary) return true;
    }
    return false;
  }

 private:
  uint64_t start_ = 0, bytes_ = 0;
  Bytes all_;
};

/// The values of one case. Each row is of one kind: ordinary, zero, -0, subnormal, huge (its
/// squares or its sum overflow), tiny (its squares underflow), or with single NaNs or infinities.
struct NormData {
  std::vector<Bytes> inputs;     // by rank
  std::vector<Bytes> residuals;  // by rank; all equal unless rows are scattered
  Bytes weight, bias;
  float given_scale = 0.037f;
};

inline float random_value(std::mt19937_64& random, uint64_t kind) {
  const double unit = double(random() >> 11) * 0x1p-53;
  const double normal = (unit - 0.5) * std::exp2(double(random() % 6)) / 4;
  switch (kind) {
    case 3: return 0;
    case 4: return -0.0f;
    case 5: return float(normal * 0x1p-130);
    case 6: return float(normal * 0x1p+66);
    case 7: return float(normal * 0x1p-80);
    case 8: return float(normal * 0x1p-20);
    case 9:
      if (random() % 61 == 0) return std::nanf("");
      return float(normal);
    case 10:
      if (random() % 61 == 0) return random() % 2 == 0 ? INFINITY : -INFINITY;
      return float(normal);
    case 11: return float(normal * 60000);
    default: return float(normal);
  }
}

inline Bytes random_tensor(std::mt19937_64& random, uint64_t rows, uint64_t cols, DType dtype,
                           uint64_t kind, bool by_row) {
  Bytes values(rows * cols * size_t(dtype_size(dtype)));
  for (uint64_t i = 0; i < rows * cols; ++i) {
    narrow_to(values.data(), i, dtype,
              random_value(random, by_row ? (kind + i / cols) % 12 : kind));
  }
  return values;
}

inline NormData make_data(const NormCase& c, int world) {
  std::mt19937_64 random(c.seed + 1);
  NormData data;
  for (int r = 0; r < world; ++r) {
    data.inputs.push_back(random_tensor(random, c.rows, c.cols, c.dtype, c.seed, true));
  }
  const Bytes residual = random_tensor(random, c.rows, c.cols, c.dtype, c.seed, true);
  data.residuals.assign(size_t(world), residual);
  const uint64_t kind = c.seed % 7 == 3 ? 9 : c.seed % 7 == 5 ? 10 : 0;
  data.weight = random_tensor(random, 1, c.cols, c.weight_dtype(), kind, false);
  // Biases of -0 reveal the signs of zeros.
  data.bias = random_tensor(random, 1, c.cols, c.weight_dtype(), c.seed % 5 == 1 ? 4 : 0, false);
  // A NaN with all bits set in a float32 weight must not become a zero of the dtype.
  if (kind == 9 && c.options.weight_float32) {
    reinterpret_cast<uint32_t*>(data.weight.data())[c.cols / 2] = 0xffffffffu;
  }
  return data;
}

inline NormCall make_norm(const NormCase& c, Algorithm algorithm, bool symmetric = false) {
  NormCall call{};
  call.collective = c.collective;
  call.dtype = c.dtype;
  call.rows = c.rows;
  call.cols = c.cols;
  call.options = c.options;
  call.plan =
      plan_of({c.collective, algorithm, symmetric}, c.dtype, c.numel() * c.element(), 2, false);
  call.descriptor.collective = c.collective;
  call.descriptor.dtype = c.dtype;
  call.descriptor.algorithm = algorithm;
  call.descriptor.dims = 2;
  call.descriptor.numel = c.numel();
  call.descriptor.sizes[0] = int64_t(c.rows);
  call.descriptor.sizes[1] = int64_t(c.cols);
  return call;
}

/// One rank's results of one call. Results that a case does not request are null.
class NormOutputs {
 public:
  /// `rows`: the number of rows that the rank gets.
  NormOutputs(const NormCase& c, uint64_t rows) : c_(c), rows_(rows) {
    const uint64_t shift = c.seed % 5;
    const uint64_t bytes = rows * c.cols * c.element();
    if (c.residual) residual_out_ = Guarded(bytes, shift * c.element());
    if (c.normalized) normalized_ = Guarded(bytes, (shift + 3) * c.element());
    if (!c.quantizes()) return;
    quantized_ = Guarded(rows * c.cols, shift + 1);
    const uint64_t groups = c.options.scale_mode == ScaleMode::group
                                ? c.cols / uint64_t(c.options.quant_group_size)
                                : 1;
    const uint64_t scales = c.options.scale_mode == ScaleMode::tensor ? 1 : rows * groups;
    const uint64_t width = scale_bytes(c.options.scale_type);
    scale_ = Guarded(scales * width, shift * width);
  }

  void put_into(NormCall& call) {
    call.residual_out = c_.residual ? residual_out_.get() : nullptr;
    call.normalized = c_.normalized ? normalized_.get() : nullptr;
    call.quantized = c_.quantizes() ? quantized_.get() : nullptr;
    call.scale = c_.quantizes() ? scale_.get() : nullptr;
  }

  /// Returns the first difference, or "" if there is none.
  std::string compare(NormResult expected) {
    const auto differs = [](Guarded& got, const Bytes& wanted, uint64_t numel, DType dtype) {
      return first_difference(got.get(), wanted.data(), numel, dtype);
    };
    std::string found;
    const auto note = [&](const char* name, const std::string& difference) {
      if (found.empty() && !difference.empty()) found = std::string(name) + ": " + difference;
    };
    const uint64_t numel = rows_ * c_.cols;
    if (c_.residual)
      note("residual_out", differs(residual_out_, expected.residual_out, numel, c_.dtype));
    if (c_.normalized)
      note("normalized", differs(normalized_, expected.normalized, numel, c_.dtype));
    if (c_.quantizes()) {
      note("scale", differs(scale_, expected.scale, expected.scale.size(), DType::uint8));
      note("quantized", differs(quantized_, expected.quantized, numel, DType::uint8));
    }
    for (const Guarded* g : {&residual_out_, &normalized_, &quantized_, &scale_}) {
      if (g->written_outside()) note("bytes around a result", "overwritten");
    }
    return found;
  }

 private:
  const NormCase c_;
  uint64_t rows_;
  Guarded residual_out_, normalized_, quantized_, scale_;
};

/// Returns the expected results of rank `rank`, of its rows if rows are scattered.
inline NormResult expected_norm(const NormCase& c, const NormData& data, int world, int rank) {
  const Part part = scatters_rows(c.collective) ? partition(c.rows, world, rank) : Part{0, c.rows};
  const uint64_t first = part.start * c.cols * c.element();
  std::vector<const char*> inputs;
  for (const Bytes& input : data.inputs) inputs.push_back(input.data() + first);
  NormReference reference(c.options, c.dtype, part.count, c.cols);
  return reference(inputs, c.residual ? data.residuals[0].data() + first : nullptr,
                   data.weight.data(), c.options.norm == Norm::layer ? data.bias.data() : nullptr,
                   &data.given_scale);
}

/// Returns forms with all options and combinations of them.
inline std::vector<NormCase> norm_forms() {
  std::vector<NormCase> forms;
  NormCase base;
  base.options.eps = 1e-6f;
  base.options.scale_ub = INFINITY;
  const Rounding roundings[] = {Rounding::fp32, Rounding::parity, Rounding::parity_weight};
  for (const Rounding rounding : roundings) {
    for (const bool residual : {false, true}) {
      for (const bool wide : {false, true}) {
        NormCase c = base;
        c.options.rounding = rounding;
        c.options.weight_float32 = wide;
        c.options.weight_offset = wide ? 1.0f : 0.0f;
        c.options.eps = wide ? 0.0f : 1e-6f;
        c.residual = residual;
        c.collective =
            residual ? Collective::allreduce_residual_rmsnorm : Collective::allreduce_rmsnorm;
        forms.push_back(c);
        c.options.norm = Norm::layer;
        c.options.weight_offset = 0;
        c.collective =
            residual ? Collective::allreduce_residual_layernorm : Collective::allreduce_layernorm;
        forms.push_back(c);
      }
    }
  }
  struct Scales {
    ScaleMode mode;
    ScaleType type;
    bool ue8m0, column_major;
    int32_t group;
    float scale_ub;
  };
  const Scales scales[] = {
      {ScaleMode::row, ScaleType::float32, false, false, 0, INFINITY},
      {ScaleMode::row, ScaleType::float32, false, false, 0, 0.5f},
      {ScaleMode::row, ScaleType::float16, false, false, 0, INFINITY},
      {ScaleMode::row, ScaleType::bfloat16, true, false, 0, 100.0f},
      {ScaleMode::row, ScaleType::float8_e8m0fnu, true, false, 0, INFINITY},
      {ScaleMode::tensor, ScaleType::float32, false, false, 0, INFINITY},
      {ScaleMode::group, ScaleType::float32, false, false, 16, INFINITY},
      {ScaleMode::group, ScaleType::float32, true, true, 128, INFINITY},
      {ScaleMode::group, ScaleType::float16, false, true, 32, 2.0f},
      {ScaleMode::group, ScaleType::bfloat16, false, false, 64, INFINITY},
      {ScaleMode::group, ScaleType::float8_e8m0fnu, true, true, 16, INFINITY},
      {ScaleMode::group, ScaleType::float8_e8m0fnu, true, false, 128, INFINITY},
  };
  uint64_t i = 0;
  for (const Quantization q : {Quantization::e4m3fn, Quantization::e5m2, Quantization::int8}) {
    for (const Rounding rounding : roundings) {
      for (const Scales& s : scales) {
        NormCase c = base;
        c.options.quantization = q;
        c.options.rounding = rounding;
        c.options.scale_mode = s.mode;
        c.options.scale_type = s.type;
        c.options.ue8m0 = s.ue8m0;
        c.options.column_major = s.column_major;
        c.options.quant_group_size = s.group;
        c.options.scale_ub = s.scale_ub;
        c.options.weight_float32 = i % 5 == 0;
        c.options.weight_offset = i % 3 == 0 ? 1.0f : 0.0f;
        c.options.eps = i % 4 == 0 ? 0.0f : 1e-5f;
        c.residual = i % 2 == 0;
        c.normalized = i % 3 != 1;
        const bool int8 = q == Quantization::int8;
        c.collective = c.residual ? (int8 ? Collective::allreduce_residual_rmsnorm_int8
                                          : Collective::allreduce_residual_rmsnorm_fp8)
                                  : (int8 ? Collective::allreduce_rmsnorm_int8
                                          : Collective::allreduce_rmsnorm_fp8);
        forms.push_back(c);
        ++i;
      }
    }
  }
  return forms;
}

/// Whether a form can have this number of columns.
inline bool fits(const NormCase& c) {
  return c.options.scale_mode != ScaleMode::group ||
         c.cols % uint64_t(c.options.quant_group_size) == 0;
}

}  // namespace collx::cpu
