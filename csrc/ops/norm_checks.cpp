#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "../protocol/geometry.h"
#include "../protocol/names.h"
#include "checks.h"
#include "communicator.h"
#include "norm.h"
#include "registry.h"
#include "torch_version.h"

namespace collx {

namespace {

/// The position of an option among its names.
template <typename E, size_t N>
E choose(const char* op, const char* argument, std::string_view given,
         const std::array<std::string_view, N>& names) {
  const std::optional<E> found = find_name<E>(names, given);
  TORCH_CHECK_VALUE(found, "collx.", op, ": ", argument, ": got \"", given,
                    "\"; accepted: ", c10::Join(", ", names));
  return *found;
}

/// The nearest value of a dtype.
float rounded(double value, at::ScalarType dtype) {
  const auto nearest = static_cast<float>(value);
  if (dtype == at::kHalf) return static_cast<float>(c10::Half(nearest));
  if (dtype == at::kBFloat16) return static_cast<float>(c10::BFloat16(nearest));
  return nearest;
}

DType check_input(const char* op, const at::Tensor& input, bool scatters) {
  const DType dtype = check_dtype(op, "input", input);
  TORCH_CHECK_TYPE(can_normalize(dtype), "collx.", op, ": input: got dtype ", name_of(dtype),
                   "; accepted: float32, float16, bfloat16");
  TORCH_CHECK_VALUE(scatters ? input.dim() == 2 : input.dim() >= 2, "collx.", op,
                    ": input: got shape ", input.sym_sizes(), "; accepted: [rows, cols]",
                    scatters ? "" : ", or more leading dimensions");
  TORCH_CHECK_VALUE(input.sym_size(-1) > 0, "collx.", op, ": input: got shape ", input.sym_sizes(),
                    "; accepted: rows of at least one element");
  return dtype;
}

/// Checks a weight or bias.
void check_vector(const char* op, const char* argument, const at::Tensor& vector,
                  const at::Tensor& input) {
  TORCH_CHECK_TYPE(vector.layout() == at::kStrided, "collx.", op, ": ", argument,
                   ": got a tensor of layout ", vector.layout(), "; accepted: strided (dense)");
  TORCH_CHECK_TYPE(
      vector.scalar_type() == input.scalar_type() || vector.scalar_type() == at::kFloat, "collx.",
      op, ": ", argument, ": got dtype ", dtype_name(vector.scalar_type()),
      "; accepted: the input's, ", dtype_name(input.scalar_type()), ", or float32");
  TORCH_CHECK_VALUE(vector.dim() == 1 && vector.sym_size(0) == input.sym_size(-1), "collx.", op,
                    ": ", argument, ": got shape ", vector.sym_sizes(), "; accepted: [",
                    input.sym_size(-1), "], one element for each column of input");
  TORCH_CHECK_VALUE(vector.device() == input.device(), "collx.", op, ": ", argument,
                    ": got a tensor on ", vector.device(), "; accepted: the input's device, ",
                    input.device());
}

void check_residual(const char* op, const Arguments& a, bool scatters) {
  c10::SymDimVector sizes(a.input.sym_sizes().begin(), a.input.sym_sizes().end());
  if (scatters) {
    TORCH_CHECK_VALUE(a.residual.dim() == 2, "collx.", op, ": residual: got shape ",
                      a.residual.sym_sizes(), "; accepted: [this rank's rows, cols]");
    // The distribution of the rows depends on the communicator.
    const auto communicator = registry::look_up(a.group_name);
    if (communicator == nullptr) {
      sizes[0] = a.residual.sym_size(0);
    } else {
      const int world = communicator->options().world_size;
      const int rank = communicator->options().rank;
      const c10::SymInt rows = sizes[0], quotient = rows / world;
      sizes[0] = rows % world > rank ? quotient + 1 : quotient;
    }
  }
  check_out(op, a.input, sizes, a.residual, "residual");
}

void check_number(const char* op, const char* argument, double value, bool good,
                  const char* accepted) {
  TORCH_CHECK_VALUE(good, "collx.", op, ": ", argument, ": got ", value, "; accepted: ", accepted);
}

void check_groups(const char* op, const Arguments& a, const c10::SymInt& cols, NormOptions& o) {
  TORCH_CHECK_VALUE(a.quant_group_size >= kSmallestGroup && a.quant_group_size <= kLargestGroup &&
                        std::has_single_bit(static_cast<uint64_t>(a.quant_group_size)),
                    "collx.", op, ": quant_group_size: got ", a.quant_group_size,
                    "; accepted: a power of two from ", kSmallestGroup, " to ", kLargestGroup);
  TORCH_CHECK_VALUE(cols % a.quant_group_size == 0, "collx.", op, ": quant_group_size: got ",
                    a.quant_group_size, " with rows of ", cols,
                    "; accepted: a divisor of the columns");
  o.quant_group_size = static_cast<int32_t>(a.quant_group_size);
}

void check_given_scale(const char* op, const Arguments& a) {
  if (a.scale_mode != "tensor") {
    TORCH_CHECK_VALUE(!a.scale, "collx.", op, ": scale: got a tensor with scale_mode \"",
                      a.scale_mode, "\"; accepted: None, except with scale_mode \"tensor\"");
    return;
  }
  TORCH_CHECK_VALUE(a.scale.has_value(), "collx.", op,
                    ": scale: got None with scale_mode \"tensor\"; accepted: a float32 tensor of "
                    "one element");
  TORCH_CHECK_TYPE(a.scale->layout() == at::kStrided && a.scale->scalar_type() == at::kFloat,
                   "collx.", op, ": scale: got dtype ", dtype_name(a.scale->scalar_type()),
                   "; accepted: float32");
  TORCH_CHECK_VALUE(a.scale->sym_numel() == 1, "collx.", op, ": scale: got shape ",
                    a.scale->sym_sizes(), "; accepted: one element");
  TORCH_CHECK_VALUE(a.scale->device() == a.input.device(), "collx.", op,
                    ": scale: got a tensor on ", a.scale->device(),
                    "; accepted: the input's device, ", a.input.device());
  const auto refuse = [&](const char* argument, bool given) {
    TORCH_CHECK_VALUE(
        !given, "collx.", op, ": ", argument,
        ": got a value with scale_mode \"tensor\", in which the scale is an argument; "
        "accepted: only with scale_mode \"row\" or \"group\"");
  };
  refuse("scale_ub", a.scale_ub.has_value());
  refuse("ue8m0", a.ue8m0);
  refuse("scale_dtype", a.scale_dtype != "float32");
}

void check_quantization(const Operator& operation, const Arguments& a, at::ScalarType input,
                        const c10::SymInt& cols, NormOptions& o) {
  const char* op = operation.name.c_str();
  o.quantization = Quantization::int8;
  if (is_fp8(operation.collective)) {
    constexpr std::array<std::string_view, 2> kNames = {"e4m3fn", "e5m2"};
    constexpr Quantization kMeant[] = {Quantization::e4m3fn, Quantization::e5m2};
    o.quantization = kMeant[choose<int>(op, "fp8_dtype", a.fp8_dtype, kNames)];
  }
  o.scale_mode = choose<ScaleMode>(op, "scale_mode", a.scale_mode, kScaleModeNames);
  if (a.scale_ub) {
    check_number(op, "scale_ub", *a.scale_ub, *a.scale_ub >= 0, "None, 0 and more");
  }
  o.scale_ub = static_cast<float>(a.scale_ub.value_or(std::numeric_limits<double>::infinity()));
  if (o.scale_mode == ScaleMode::group) check_groups(op, a, cols, o);
  o.ue8m0 = a.ue8m0;
  const ScaleType like_input = input == at::kHalf       ? ScaleType::float16
                               : input == at::kBFloat16 ? ScaleType::bfloat16
                                                        : ScaleType::float32;
  constexpr std::array<std::string_view, 3> kScaleDtypes = {"float32", "input", "float8_e8m0fnu"};
  const ScaleType meant[] = {ScaleType::float32, like_input, ScaleType::float8_e8m0fnu};
  o.scale_type = meant[choose<int>(op, "scale_dtype", a.scale_dtype, kScaleDtypes)];
  TORCH_CHECK_VALUE(o.scale_type != ScaleType::float8_e8m0fnu || o.ue8m0, "collx.", op,
                    ": scale_dtype: got \"float8_e8m0fnu\", which holds powers of two; accepted: "
                    "only with ue8m0=True");
  constexpr std::array<std::string_view, 2> kLayouts = {"row", "column"};
  o.column_major = choose<int>(op, "scale_layout", a.scale_layout, kLayouts) == 1;
  TORCH_CHECK_VALUE(!o.column_major || o.scale_mode == ScaleMode::group, "collx.", op,
                    ": scale_layout: got \"column\" with scale_mode \"", a.scale_mode,
                    "\"; accepted: only with scale_mode \"group\"");
}

at::ScalarType dtype_of_scales(const NormOptions& o) {
  switch (o.scale_type) {
    case ScaleType::float16: return at::kHalf;
    case ScaleType::bfloat16: return at::kBFloat16;
    case ScaleType::float8_e8m0fnu: return at::kFloat8_e8m0fnu;
    case ScaleType::float32: break;
  }
  return at::kFloat;
}

NormResultShape shape_of(Output result, const Arguments& a, const NormOptions& o) {
  // In a scattering operator, the residual has the number of this rank's rows.
  const at::Tensor& like = a.residual.defined() ? a.residual : a.input;
  const c10::SymIntArrayRef sizes = like.sym_sizes();
  NormResultShape shape{result, a.input.scalar_type(), {sizes.begin(), sizes.end()}};
  if (result == Output::quantized) {
    shape.dtype = o.quantization == Quantization::int8   ? at::kChar
                  : o.quantization == Quantization::e5m2 ? at::kFloat8_e5m2
                                                         : at::kFloat8_e4m3fn;
  } else if (result == Output::scale) {
    shape.dtype = dtype_of_scales(o);
    const c10::SymInt cols = shape.sizes.back();
    shape.sizes.pop_back();
    if (o.scale_mode == ScaleMode::tensor) shape.sizes = {c10::SymInt(1)};
    if (o.scale_mode == ScaleMode::group) shape.sizes.push_back(cols / o.quant_group_size);
    shape.column_major = o.column_major;
  }
  return shape;
}

/// `sizes` are those of the normalized tensor.
std::shared_ptr<const KnownExpression> check_epilogue(const char* op, const Arguments& a,
                                                      c10::SymIntArrayRef sizes) {
  if (a.expression.empty()) {
    TORCH_CHECK_VALUE(a.extras.empty(), "collx.", op, ": extras: got ", a.extras.size(),
                      " tensors without an expression; accepted: none");
    TORCH_CHECK_VALUE(a.numbers.empty(), "collx.", op, ": numbers: got ", a.numbers.size(),
                      " without an expression; accepted: none");
    return nullptr;
  }
  auto known = check_expression(op, a.expression, a.input.scalar_type());
  const at::ScalarType result = scalar_type_of(known->expression.result());
  TORCH_CHECK_TYPE(result == a.input.scalar_type(), "collx.", op, ": expression: returns ",
                   dtype_name(result), "; accepted: the input's dtype, ",
                   dtype_name(a.input.scalar_type()));
  check_extras(op, known->expression, a.extras, a.input, sizes);
  with_numbers(op, known->expression, a.numbers);
  return known;
}

}  // namespace

c10::SymDimVector NormResultShape::strides() const {
  c10::SymDimVector result(sizes.size(), c10::SymInt(1));
  c10::SymInt stride = 1;
  const size_t axes = column_major ? sizes.size() - 1 : sizes.size();
  for (size_t i = axes; i-- > 0;) {
    result[i] = stride;
    stride = stride * sizes[i].max(1);
  }
  if (column_major) result.back() = stride;
  return result;
}

NormOptions check_norm_options(const Operator& operation, const Arguments& a, at::ScalarType input,
                               const c10::SymInt& cols) {
  const char* op = operation.name.c_str();
  NormOptions o;
  o.norm = row_of(operation.collective).layer_norm ? Norm::layer : Norm::rms;
  o.rounding = choose<Rounding>(op, "rounding", a.rounding, kRoundingNames);
  check_number(op, "eps", a.eps, a.eps >= 0 && std::isfinite(a.eps), "a finite number from 0");
  check_number(op, "weight_offset", a.weight_offset, std::isfinite(a.weight_offset),
               "a finite number");
  o.eps = o.rounding == Rounding::fp32 ? rounded(a.eps, input) : static_cast<float>(a.eps);
  o.weight_offset = rounded(a.weight_offset, input);
  if (is_quantized(operation.collective)) check_quantization(operation, a, input, cols, o);
  return o;
}

NormCheck check_norm(const Operator& operation, const Arguments& a) {
  const char* op = operation.name.c_str();
  const bool scatters = scatters_rows(operation.collective);
  NormCheck check{};
  check.collective = operation.collective;
  check.dtype = check_input(op, a.input, scatters);
  check_vector(op, "weight", a.weight, a.input);
  if (a.bias.defined()) {
    check_vector(op, "bias", a.bias, a.input);
    TORCH_CHECK_TYPE(a.bias.scalar_type() == a.weight.scalar_type(), "collx.", op,
                     ": bias: got dtype ", dtype_name(a.bias.scalar_type()),
                     "; accepted: the weight's, ", dtype_name(a.weight.scalar_type()));
  }
  if (a.residual.defined()) check_residual(op, a, scatters);
  if (is_quantized(operation.collective)) check_given_scale(op, a);
  check.options = check_norm_options(operation, a, a.input.scalar_type(), a.input.sym_size(-1));
  check.options.weight_float32 = a.weight.scalar_type() == at::kFloat;
  check.algorithm = check_algorithm(op, operation.collective, a.algorithm);
  check.max_blocks = check_max_blocks(op, a.max_blocks);
  for (const Output result : operation.outputs) {
    check.results.push_back(shape_of(result, a, check.options));
  }
  check.epilogue = check_epilogue(op, a, check.results[0].sizes);
  return check;
}

}  // namespace collx
