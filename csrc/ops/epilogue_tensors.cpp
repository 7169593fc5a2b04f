// Evaluates expressions with PyTorch's operators, statement by statement, and their derivatives.
#include <ATen/ATen.h>

#include <bit>
#include <cmath>
#include <numbers>

#include "epilogue.h"

namespace collx {

namespace {

using at::Tensor;

at::Scalar number_of(const Statement& s) {
  switch (s.type) {
    case ValueType::float32: return std::bit_cast<float>(static_cast<uint32_t>(s.number));
    case ValueType::float64: return std::bit_cast<double>(s.number);
    case ValueType::boolean: return s.number != 0;
    default: {
      const int unused = 64 - 8 * kValueTypes[static_cast<int>(s.type)].bytes;
      const auto high = static_cast<int64_t>(s.number << unused);
      return s.type == ValueType::uint8 ? static_cast<int64_t>(s.number) : high >> unused;
    }
  }
}

/// The minimum or maximum, which is NaN if either operand is. Of equal numbers it selects by the
/// sign, since -0 is below +0.
Tensor extreme(const Tensor& a, const Tensor& b, bool least) {
  const Tensor found = least ? at::minimum(a, b) : at::maximum(a, b);
  if (!a.is_floating_point()) return found;
  return at::where(a == b, at::where(at::signbit(a) == least, a, b), found);
}

/// Converts to an integer type as kernels do: through int64, whose smallest value stands for NaN
/// and for all values outside of its range. PyTorch's own conversion of these differs between
/// devices.
Tensor converted(const Tensor& a, at::ScalarType type) {
  if (!a.is_floating_point() || !at::isIntegralType(type, /*includeBool=*/false)) return a.to(type);
  const Tensor wide = a.to(at::kDouble);
  return at::where((wide >= -0x1p63).logical_and(wide < 0x1p63), wide, -0x1p63)
      .to(at::kLong)
      .to(type);
}

Tensor computed(const Statement& s, const Tensor& a, const Tensor& b, const Tensor& c) {
  switch (s.what) {
    case Do::cast: return converted(a, scalar_type_of(s.type));
    case Do::add: return a + b;
    case Do::sub: return a - b;
    case Do::mul: return a * b;
    case Do::div: return a / b;
    case Do::neg: return -a;
    case Do::abs: return a.abs();
    case Do::minimum:
    case Do::clamp_max: return extreme(a, b, true);
    case Do::maximum:
    case Do::clamp_min: return extreme(a, b, false);
    case Do::relu: return extreme(a, at::zeros_like(a), false);
    case Do::floor_divide: return at::div(a, b, "floor");
    case Do::remainder: return at::remainder(a, b);
    case Do::where: return at::where(a, b, c);
    case Do::lt: return a < b;
    case Do::le: return a <= b;
    case Do::gt: return a > b;
    case Do::ge: return a >= b;
    case Do::eq: return a == b;
    case Do::ne: return a != b;
    case Do::land: return at::logical_and(a, b);
    case Do::lor: return at::logical_or(a, b);
    case Do::lxor: return at::logical_xor(a, b);
    case Do::lnot: return at::logical_not(a);
    case Do::sqrt: return a.sqrt();
    case Do::rsqrt: return a.rsqrt();
    case Do::exp: return a.exp();
    case Do::log: return a.log();
    case Do::tanh: return a.tanh();
    case Do::sigmoid: return a.sigmoid();
    case Do::silu: return at::silu(a);
    case Do::erf: return a.erf();
    case Do::gelu: return at::gelu(a, "none");
    case Do::gelu_tanh: return at::gelu(a, "tanh");
    default: TORCH_INTERNAL_ASSERT(false, "a leaf has no operands");
  }
}

/// The value of every statement, in order.
std::vector<Tensor> values_of(const Expression& expression, const Tensor& value,
                              at::TensorList extras, Origin origin) {
  std::vector<Tensor> values;
  values.reserve(expression.statements.size());
  for (const Statement& s : expression.statements) {
    const auto operand = [&](int i) { return values[s.operands[i]]; };
    const int operands = operands_of(s.what);
    if (s.what == Do::value) {
      values.push_back(value);
    } else if (s.what == Do::extra) {
      values.push_back(extras[s.number]);
    } else if (s.what == Do::index) {
      values.push_back(
          coordinate(value.sizes(), static_cast<int64_t>(s.number), origin, value.device()));
    } else if (s.what == Do::constant) {  // also a number of the call: see with_numbers
      values.push_back(
          at::scalar_tensor(number_of(s), value.options().dtype(scalar_type_of(s.type))));
    } else {
      values.push_back(computed(s, operand(0), operands > 1 ? operand(1) : Tensor(),
                                operands > 2 ? operand(2) : Tensor()));
    }
  }
  return values;
}

/// The gradients of the operands of a statement, from the gradient `g` of its result `r`.
void differentiate(const Statement& s, const Tensor& g, const Tensor& r, const Tensor& a,
                   const Tensor& b, Tensor (&to)[3]) {
  const auto only = [&](const Tensor& mask) { return at::where(mask, g, at::zeros_like(g)); };
  switch (s.what) {
    case Do::cast: to[0] = g.to(a.scalar_type()); return;
    case Do::add: to[0] = to[1] = g; return;
    case Do::sub:
      to[0] = g;
      to[1] = -g;
      return;
    case Do::mul:
      to[0] = g * b;
      to[1] = g * a;
      return;
    case Do::div:
      to[0] = g / b;
      to[1] = -g * (r / b);
      return;
    case Do::neg: to[0] = -g; return;
    case Do::abs: to[0] = g * a.sgn(); return;
    case Do::minimum:
    case Do::maximum: {
      const Tensor shared = at::where(a == b, g / 2, g);
      // Like PyTorch, both operands get the gradient of a NaN.
      const Tensor first = s.what == Do::minimum ? a > b : a < b;
      const Tensor second = s.what == Do::minimum ? b > a : b < a;
      to[0] = at::where(first, at::zeros_like(g), shared);
      to[1] = at::where(second, at::zeros_like(g), shared);
      return;
    }
    case Do::clamp_min:
      to[0] = only(a >= b);
      to[1] = only(a < b);
      return;
    case Do::clamp_max:
      to[0] = only(a <= b);
      to[1] = only(a > b);
      return;
    case Do::relu: to[0] = at::where(a <= 0, at::zeros_like(g), g); return;
    case Do::where:
      to[1] = only(a);
      to[2] = at::where(a, at::zeros_like(g), g);
      return;
    case Do::sqrt: to[0] = g / (2 * r); return;
    case Do::rsqrt: to[0] = -0.5 * g * r * r * r; return;
    case Do::exp: to[0] = g * r; return;
    case Do::log: to[0] = g / a; return;
    case Do::tanh: to[0] = at::tanh_backward(g, r); return;
    case Do::sigmoid: to[0] = at::sigmoid_backward(g, r); return;
    case Do::silu: {  // PyTorch's own backward of silu has no derivative
      const Tensor sigmoid = a.sigmoid();
      to[0] = g * sigmoid * (1 + a * (1 - sigmoid));
      return;
    }
    case Do::erf: to[0] = g * (2 * std::numbers::inv_sqrtpi) * (-a * a).exp(); return;
    case Do::gelu: to[0] = at::gelu_backward(g, a, "none"); return;
    case Do::gelu_tanh: to[0] = at::gelu_backward(g, a, "tanh"); return;
    default:  // no derivative
      return;
  }
}

}  // namespace

Tensor evaluate(const Expression& expression, const Tensor& value, at::TensorList extras,
                Origin origin) {
  // The result has the shape of the value even if the expression does not use the value.
  return values_of(expression, value, extras, origin).back().expand(value.sizes());
}

std::vector<Tensor> gradients(const Expression& expression, const Tensor& value,
                              at::TensorList extras, Origin origin, const Tensor& gradient) {
  const std::vector<Tensor> values = values_of(expression, value, extras, origin);
  std::vector<Tensor> found(1 + extras.size());
  std::vector<Tensor> of(values.size());
  of.back() = gradient;
  for (size_t k = values.size(); k-- > 0;) {
    const Statement& s = expression.statements[k];
    if (!of[k].defined() || !values[k].is_floating_point()) continue;
    if (s.what == Do::value || s.what == Do::extra) {
      found[s.what == Do::value ? 0 : 1 + s.number] = of[k];
      continue;
    }
    if (kDo[static_cast<int>(s.what)].takes == Takes::leaf) continue;
    Tensor to[3];
    differentiate(s, of[k], values[k], values[s.operands[0]], values[s.operands[1]], to);
    for (int i = 0; i < 3; ++i) {
      if (!to[i].defined() || !values[s.operands[i]].is_floating_point()) continue;
      Tensor& sum = of[s.operands[i]];
      sum = sum.defined() ? sum + to[i] : to[i];
    }
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i].defined())
      found[i] = found[i].sum_to_size((i == 0 ? value : extras[i - 1]).sizes());
  }
  return found;
}

}  // namespace collx
