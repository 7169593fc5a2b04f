#include "function_table.h"

#include <c10/util/Exception.h>

#include "../protocol/names.h"

namespace collx {

namespace {

std::string norm_function(const CollectiveRow& row) {
  return std::string(row.scatters ? "reducescatter" : "allreduce") +
         (row.layer_norm ? "_layernorm" : "_rmsnorm");
}

/// Returns nullopt for operators that only other operators call.
std::optional<Variant> variant_of(const Operator& op) {
  const bool with_value = op.family == Family::map && op.outputs.size() == 2;
  if (op.family == Family::epilogue || with_value) return std::nullopt;
  const CollectiveRow& row = row_of(op.collective);
  Variant variant{&op, op.family == Family::norm ? norm_function(row) : row.name, 0};
  if (op.form == Form::in_place) variant.function += '_';
  const auto add = [&](bool given, Feature feature) {
    if (given) variant.features |= bit(feature);
  };
  add(op.family == Family::map, Feature::epilogue);
  add(op.family == Family::device_splits, Feature::device_splits);
  add(row.residual, Feature::residual);
  add(row.quantized == Quantized::fp8, Feature::fp8);
  add(row.quantized == Quantized::int8, Feature::int8);
  add(!op.outputs.empty() && is_quantized(op.collective) && op.outputs.back() == Output::normalized,
      Feature::keep_norm);
  add(op.takes_outputs(), Feature::out);
  return variant;
}

}  // namespace

std::vector<Variant> variants_of(const std::string& function) {
  std::vector<Variant> found;
  for (const Operator& op : operators()) {
    auto variant = variant_of(op);
    if (variant && variant->function == function) found.push_back(*std::move(variant));
  }
  TORCH_CHECK_VALUE(!found.empty(), "collx: no operator for a function ", function);
  return found;
}

const char* parameter_of(const Operator& op, size_t argument) {
  switch (op.arguments.at(argument)) {
    case Argument::group_size:
    case Argument::group_name: return "group";
    case Argument::expression:
    case Argument::optional_expression:
    case Argument::extras:
    case Argument::optional_extras:
    case Argument::numbers: return "epilogue";
    case Argument::scale_ub:
    case Argument::fp8_dtype:
    case Argument::scale_mode:
    case Argument::quant_group_size:
    case Argument::ue8m0:
    case Argument::scale_dtype:
    case Argument::scale_layout: return "quantization";
    case Argument::device_splits: return "device_splits";
    default: return op.handle().schema().arguments()[argument].name().c_str();
  }
}

}  // namespace collx
