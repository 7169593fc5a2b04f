#include "norm_operators.h"

#include <c10/util/Exception.h>

#include "../protocol/exchange.h"
#include "../protocol/names.h"

namespace collx {

namespace {

constexpr const char* kSchemas[] = {
    "Tensor input",
    "Tensor residual",
    "Tensor weight",
    "Tensor bias",
    "float eps",
    "str group_name",
    "float weight_offset=0.0",
    "float? scale_ub=None",
    "str fp8_dtype=\"e4m3fn\"",
    "str scale_mode=\"row\"",
    "Tensor? scale=None",
    "int quant_group_size=128",
    "bool ue8m0=False",
    "str scale_dtype=\"float32\"",
    "str scale_layout=\"row\"",
    "str rounding=\"fp32\"",
    "str algorithm=\"auto\"",
    "int max_blocks=0",
};

bool has_word(Collective collective, std::string_view word) {
  return name_of(collective).find(word) != std::string_view::npos;
}

std::vector<NormArgument> arguments_of(Collective c) {
  using A = NormArgument;
  const bool layer = has_word(c, "layernorm"), fp8 = has_word(c, "fp8");
  std::vector<A> list;
  const auto add = [&](std::initializer_list<A> more) {
    for (const A argument : more) list.push_back(argument);
  };
  add({A::input});
  if (has_word(c, "residual")) add({A::residual});
  add({A::weight});
  if (layer) add({A::bias});
  add({A::eps, A::group_name});
  if (!layer) add({A::weight_offset});
  if (fp8 || has_word(c, "int8")) {
    add({A::scale_ub});
    if (fp8) add({A::fp8_dtype});
    add({A::scale_mode, A::scale, A::quant_group_size, A::ue8m0, A::scale_dtype, A::scale_layout});
  }
  add({A::rounding, A::algorithm, A::max_blocks});
  return list;
}

std::vector<NormResult> results_of(Collective c, bool keeps_norm) {
  using R = NormResult;
  std::vector<R> list;
  if (has_word(c, "fp8") || has_word(c, "int8")) {
    list.push_back(R::quantized);
    list.push_back(R::scale);
  } else {
    list.push_back(R::out);
  }
  if (has_word(c, "residual")) list.push_back(R::residual);
  if (keeps_norm) list.push_back(R::normalized);
  return list;
}

}  // namespace

const char* NormOperator::name() const { return name_of(collective).data(); }
bool NormOperator::is_fp8() const { return has_word(collective, "fp8"); }
bool NormOperator::is_int8() const { return has_word(collective, "int8"); }

std::string NormOperator::schema() const {
  std::string text = name();
  if (!overload.empty()) text += "." + overload;
  text += "(";
  const char* separator = "";
  for (const NormArgument argument : arguments) {
    text.append(separator).append(kSchemas[static_cast<size_t>(argument)]);
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
  for (size_t i = 0; i < static_cast<size_t>(Collective::count); ++i) {
    const auto c = static_cast<Collective>(i);
    if (!is_norm(c)) continue;
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
    const c10::IValue& v = *value++;
    switch (argument) {
      case NormArgument::input:
        input = v.toTensor();
        break;
      case NormArgument::residual:
        residual = v.toTensor();
        break;
      case NormArgument::weight:
        weight = v.toTensor();
        break;
      case NormArgument::bias:
        bias = v.toTensor();
        break;
      case NormArgument::eps:
        eps = v.toDouble();
        break;
      case NormArgument::group_name:
        group_name = v.toStringView();
        break;
      case NormArgument::weight_offset:
        weight_offset = v.toDouble();
        break;
      case NormArgument::scale_ub:
        if (!v.isNone()) scale_ub = v.toDouble();
        break;
      case NormArgument::fp8_dtype:
        fp8_dtype = v.toStringView();
        break;
      case NormArgument::scale_mode:
        scale_mode = v.toStringView();
        break;
      case NormArgument::scale:
        if (!v.isNone()) scale = v.toTensor();
        break;
      case NormArgument::quant_group_size:
        quant_group_size = v.toInt();
        break;
      case NormArgument::ue8m0:
        ue8m0 = v.toBool();
        break;
      case NormArgument::scale_dtype:
        scale_dtype = v.toStringView();
        break;
      case NormArgument::scale_layout:
        scale_layout = v.toStringView();
        break;
      case NormArgument::rounding:
        rounding = v.toStringView();
        break;
      case NormArgument::algorithm:
        algorithm = v.toStringView();
        break;
      case NormArgument::max_blocks:
        max_blocks = v.toInt();
        break;
    }
  }
  for (size_t i = 0; i < outs; ++i) results.push_back((value++)->toTensor());
}

}  // namespace collx
