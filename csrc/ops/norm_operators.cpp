#include "norm_operators.h"

#include <c10/util/Exception.h>

#include "../protocol/geometry.h"
#include "../protocol/names.h"

namespace collx {

namespace {

using V = c10::IValue;
using A = NormArguments;

/// The words of the schema, and where the value goes.
struct ArgumentRow {
  NormArgument argument;
  const char* schema;
  void (*set)(A& arguments, const V& value);
};

constexpr ArgumentRow kArguments[] = {
    {NormArgument::input, "Tensor input", [](A& a, const V& v) { a.input = v.toTensor(); }},
    {NormArgument::residual, "Tensor residual",
     [](A& a, const V& v) { a.residual = v.toTensor(); }},
    {NormArgument::weight, "Tensor weight", [](A& a, const V& v) { a.weight = v.toTensor(); }},
    {NormArgument::bias, "Tensor bias", [](A& a, const V& v) { a.bias = v.toTensor(); }},
    {NormArgument::eps, "float eps", [](A& a, const V& v) { a.eps = v.toDouble(); }},
    {NormArgument::group_name, "str group_name",
     [](A& a, const V& v) { a.group_name = v.toStringView(); }},
    {NormArgument::weight_offset, "float weight_offset=0.0",
     [](A& a, const V& v) { a.weight_offset = v.toDouble(); }},
    {NormArgument::scale_ub, "float? scale_ub=None",
     [](A& a, const V& v) { a.scale_ub = v.toOptional<double>(); }},
    {NormArgument::fp8_dtype, "str fp8_dtype=\"e4m3fn\"",
     [](A& a, const V& v) { a.fp8_dtype = v.toStringView(); }},
    {NormArgument::scale_mode, "str scale_mode=\"row\"",
     [](A& a, const V& v) { a.scale_mode = v.toStringView(); }},
    {NormArgument::scale, "Tensor? scale=None",
     [](A& a, const V& v) { a.scale = v.toOptional<at::Tensor>(); }},
    {NormArgument::quant_group_size, "int quant_group_size=128",
     [](A& a, const V& v) { a.quant_group_size = v.toInt(); }},
    {NormArgument::ue8m0, "bool ue8m0=False", [](A& a, const V& v) { a.ue8m0 = v.toBool(); }},
    {NormArgument::scale_dtype, "str scale_dtype=\"float32\"",
     [](A& a, const V& v) { a.scale_dtype = v.toStringView(); }},
    {NormArgument::scale_layout, "str scale_layout=\"row\"",
     [](A& a, const V& v) { a.scale_layout = v.toStringView(); }},
    {NormArgument::rounding, "str rounding=\"fp32\"",
     [](A& a, const V& v) { a.rounding = v.toStringView(); }},
    {NormArgument::algorithm, "str algorithm=\"auto\"",
     [](A& a, const V& v) { a.algorithm = v.toStringView(); }},
    {NormArgument::max_blocks, "int max_blocks=0",
     [](A& a, const V& v) { a.max_blocks = v.toInt(); }},
    {NormArgument::expression, "str expression=\"\"",
     [](A& a, const V& v) { a.expression = v.toStringView(); }},
    // A list of tensors has no default in a schema.
    {NormArgument::extras, "Tensor[]? extras=None",
     [](A& a, const V& v) {
       if (!v.isNone()) a.extras = v.toTensorVector();
     }},
    {NormArgument::numbers, "float[] numbers=[]",
     [](A& a, const V& v) { a.numbers = v.toDoubleVector(); }},
};
static_assert(stand_at_their_values(kArguments, &ArgumentRow::argument));

std::vector<NormArgument> arguments_of(Collective c) {
  using enum NormArgument;
  const CollectiveRow& row = row_of(c);
  std::vector<NormArgument> list;
  const auto add = [&](std::initializer_list<NormArgument> more) {
    for (const NormArgument argument : more) list.push_back(argument);
  };
  add({input});
  if (row.residual) add({residual});
  add({weight});
  if (row.layer_norm) add({bias});
  add({eps, group_name});
  if (!row.layer_norm) add({weight_offset});
  if (row.quantized != Quantized::no) {
    add({scale_ub});
    if (row.quantized == Quantized::fp8) add({fp8_dtype});
    add({scale_mode, scale, quant_group_size, ue8m0, scale_dtype, scale_layout});
  }
  add({rounding, algorithm, max_blocks, expression, extras, numbers});
  return list;
}

std::vector<NormResult> results_of(Collective c, bool keeps_norm) {
  using R = NormResult;
  std::vector<R> list;
  if (row_of(c).quantized != Quantized::no) {
    list.push_back(R::quantized);
    list.push_back(R::scale);
  } else {
    list.push_back(R::out);
  }
  if (row_of(c).residual) list.push_back(R::residual);
  if (keeps_norm) list.push_back(R::normalized);
  return list;
}

}  // namespace

const char* NormOperator::name() const { return name_of(collective).data(); }
bool NormOperator::is_fp8() const { return row_of(collective).quantized == Quantized::fp8; }
bool NormOperator::is_int8() const { return row_of(collective).quantized == Quantized::int8; }

std::string NormOperator::schema() const {
  std::string text = name();
  if (!overload.empty()) text += "." + overload;
  text += "(";
  const char* separator = "";
  for (const NormArgument argument : arguments) {
    text.append(separator).append(kArguments[static_cast<size_t>(argument)].schema);
    separator = ", ";
  }
  if (out) {
    text += ", *";
    char alias = 'a';
    for (const NormResult result : results) {
      text += std::string(", Tensor(") + alias++ + "!) " + name_of(result);
    }
    return text + ") -> ()";
  }
  if (results.size() == 1) return text + ") -> Tensor";
  text += ") -> (Tensor";
  for (size_t i = 1; i < results.size(); ++i) text += ", Tensor";
  return text + ")";
}

NormResults NormOperator::planned() const {
  NormResults planned;
  for (const NormResult result : results) {
    planned.residual |= result == NormResult::residual;
    planned.quantized |= result == NormResult::quantized;
    planned.normalized |= result == NormResult::normalized || result == NormResult::out;
  }
  return planned;
}

NormOperator norm_operator(Collective c, bool keeps_norm) {
  NormOperator op{c, keeps_norm ? "keep_norm" : "", false, arguments_of(c),
                  results_of(c, keeps_norm)};
  TORCH_CHECK_VALUE(!keeps_norm || op.is_fp8() || op.is_int8(), "collx.", op.name(),
                    ": keep_norm: got True; accepted: False, since the normalized tensor is its "
                    "result");
  return op;
}

std::vector<NormOperator> norm_operators() {
  std::vector<NormOperator> list;
  for (const CollectiveRow& row : kCollectives) {
    if (!row.norm) continue;
    const Collective c = row.collective;
    const auto add = [&](const char* overload, bool keeps_norm, bool out) {
      list.push_back({c, overload, out, arguments_of(c), results_of(c, keeps_norm)});
    };
    list.push_back(norm_operator(c));
    add("out", false, true);
    if (!list.back().is_fp8() && !list.back().is_int8()) continue;
    add("keep_norm", true, false);
    add("keep_norm_out", true, true);
  }
  return list;
}

NormArguments::NormArguments(const NormOperator& op, const torch::jit::Stack& stack) {
  const size_t outs = op.out ? op.results.size() : 0;
  const c10::IValue* value = &stack[stack.size() - op.arguments.size() - outs];
  for (const NormArgument argument : op.arguments) {
    kArguments[static_cast<size_t>(argument)].set(*this, *value++);
  }
  for (size_t i = 0; i < outs; ++i) results.push_back((value++)->toTensor());
}

}  // namespace collx
