#include "operator_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace collx {

namespace {

using c10::IValue;
using torch::jit::Stack;

template <typename T>
struct OptionalOf : std::false_type {};
template <typename T>
struct OptionalOf<std::optional<T>> : std::true_type {
  using Value = T;
};

template <typename T>
T from_value(const IValue& value) {
  if constexpr (OptionalOf<T>::value) {
    if (value.isNone()) return std::nullopt;
    return from_value<typename OptionalOf<T>::Value>(value);
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.isNone() ? at::Tensor() : value.toTensor();
  } else if constexpr (std::is_same_v<T, std::string_view>) {
    return value.toStringView();
  } else if constexpr (std::is_same_v<T, double>) {
    return value.toDouble();
  } else if constexpr (std::is_same_v<T, bool>) {
    return value.toBool();
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return value.toInt();
  } else if constexpr (std::is_same_v<T, c10::SymInt>) {
    return value.toSymInt();
  } else if constexpr (std::is_same_v<T, std::vector<c10::SymInt>>) {
    return value.toSymIntVector();
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    return value.toDoubleVector();
  } else {
    static_assert(std::is_same_v<T, std::vector<at::Tensor>>);
    return value.isNone() ? T() : value.toTensorVector();
  }
}

template <typename T>
IValue to_value(const T& given) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return std::string(given);
  } else if constexpr (std::is_same_v<T, std::vector<c10::SymInt>>) {
    return c10::SymIntArrayRef(given);
  } else {
    return given;
  }
}

/// The text of the schema, and accessors of the member that holds the value.
struct ArgumentRow {
  const char* schema;
  void (*set)(Arguments& arguments, const IValue& value);
  IValue (*get)(const Arguments& arguments);
};

template <auto kMember>
constexpr ArgumentRow row(const char* schema) {
  using T = std::remove_cvref_t<decltype(std::declval<Arguments>().*kMember)>;
  return {schema, [](Arguments& a, const IValue& value) { a.*kMember = from_value<T>(value); },
          [](const Arguments& a) { return to_value<T>(a.*kMember); }};
}

#define COLLX_ROW(name, member, text) row<&Arguments::member>(text),
constexpr ArgumentRow kArguments[] = {COLLX_ARGUMENTS(COLLX_ROW)};
#undef COLLX_ROW

const ArgumentRow& row_of(Argument argument) { return kArguments[static_cast<size_t>(argument)]; }

struct Optional {
  bool taken;
  Argument argument;
};

std::vector<Argument> taken(std::initializer_list<Optional> all) {
  std::vector<Argument> list;
  for (const Optional& one : all) {
    if (one.taken) list.push_back(one.argument);
  }
  return list;
}

/// `map`: whether the operator has an epilogue.
std::vector<Argument> arguments_of_exchange(Collective c, bool map) {
  using enum Argument;
  const CollectiveRow& row = row_of(c);
  const bool parts = has_parts(c), uneven = parts && !has_equal_parts(c);
  return taken({{true, input},
                {row.reduces, reduce_op},
                {has_root(c), root},
                {row.counted, output_splits},
                {row.counted, input_splits},
                {map, expression},
                {map, extras},
                {parts, group_size},
                {true, group_name},
                {uneven, axis},
                {uneven && row.input == Extent::part, total},
                {true, algorithm},
                {true, max_blocks},
                {map, numbers}});
}

std::vector<Argument> arguments_of_norm(Collective c) {
  using enum Argument;
  const CollectiveRow& row = row_of(c);
  const bool scaled = is_quantized(c);
  return taken({{true, input},
                {row.residual, residual},
                {true, weight},
                {row.layer_norm, bias},
                {true, eps},
                {true, group_name},
                {!row.layer_norm, weight_offset},
                {scaled, scale_ub},
                {is_fp8(c), fp8_dtype},
                {scaled, scale_mode},
                {scaled, scale},
                {scaled, quant_group_size},
                {scaled, ue8m0},
                {scaled, scale_dtype},
                {scaled, scale_layout},
                {true, rounding},
                {true, algorithm},
                {true, max_blocks},
                {true, optional_expression},
                {true, optional_extras},
                {true, numbers}});
}

std::vector<Output> outputs_of_norm(Collective c, bool keeps_norm) {
  std::vector<Output> list =
      is_quantized(c) ? std::vector{Output::quantized, Output::scale} : std::vector{Output::out};
  if (row_of(c).residual) list.push_back(Output::residual);
  if (keeps_norm) list.push_back(Output::normalized);
  return list;
}

/// The positions of the arguments that must be tensors.
std::vector<size_t> tensors_of(const Operator& op) {
  std::vector<size_t> places;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (std::string_view(row_of(op.arguments[i]).schema).starts_with("Tensor "))
      places.push_back(i);
  }
  for (size_t i = op.arguments.size(); i < op.stack_size(); ++i) places.push_back(i);
  return places;
}

std::vector<Operator> make_operators() {
  using enum Argument;
  std::vector<Operator> list;
  /// Adds the form that returns new tensors, and the form with out=.
  const auto add = [&](Operator op, const char* out) {
    list.push_back(op);
    op.form = Form::out;
    op.overload = out;
    list.push_back(std::move(op));
  };
  for (const CollectiveRow& row : kCollectives) {
    const Collective c = row.collective;
    if (!has_tensors(c)) continue;
    if (row.norm) {
      const auto norm = [&](const char* overload, const char* out, bool keeps_norm) {
        add({Family::norm, c, Form::functional, row.name, overload, arguments_of_norm(c),
             outputs_of_norm(c, keeps_norm)},
            out);
      };
      norm("", "out", false);
      if (is_quantized(c)) norm("keep_norm", "keep_norm_out", true);
      continue;
    }
    const std::vector<Argument> arguments = arguments_of_exchange(c, false);
    add({Family::exchange, c, Form::functional, row.name, "", arguments, {Output::out}}, "out");
    if (keeps_shape(c)) {
      list.push_back({Family::exchange, c, Form::in_place, row.name, "", arguments, {}});
    }
    if (c == Collective::allreduce || c == Collective::reducescatter) {
      const std::string name = row.name + std::string("_map");
      const std::vector<Argument> with_epilogue = arguments_of_exchange(c, true);
      add({Family::map, c, Form::functional, name, "", with_epilogue, {Output::out}}, "out");
      // This form also returns the reduced value, which the derivative needs.
      add({Family::map,
           c,
           Form::functional,
           name + "_with_value",
           "",
           with_epilogue,
           {Output::out, Output::value}},
          "out");
    }
    if (row.counted) {
      add({Family::device_splits,
           c,
           Form::functional,
           row.name,
           "device_splits",
           {input, device_splits, capacity, group_name, algorithm, max_blocks},
           {Output::out, Output::output_splits}},
          "device_splits_out");
    }
  }
  list.push_back({Family::epilogue,
                  Collective::none,
                  Form::functional,
                  "epilogue",
                  "",
                  {value, expression, extras, axis, start, numbers},
                  {Output::out}});
  list.push_back(
      {Family::barrier, Collective::barrier, Form::functional, "barrier", "", {group_name}, {}});
  for (Operator& op : list) op.tensors = tensors_of(op);
  return list;
}

}  // namespace

std::string Operator::full_name() const {
  return name + (form == Form::in_place ? "_" : "") + (overload.empty() ? "" : "." + overload);
}

std::string Operator::schema() const {
  std::string text = full_name() + "(";
  const char* separator = "";
  for (const Argument argument : arguments) {
    const std::string words = row_of(argument).schema;
    const bool written = form == Form::in_place && argument == arguments.front();
    text += separator + (written ? "Tensor(a!)" + words.substr(words.find(' ')) : words);
    separator = ", ";
  }
  if (takes_outputs()) {
    text += ", *";
    char alias = 'a';
    for (const Output output : outputs) {
      text += std::string(", Tensor(") + alias++ + "!) " + name_of(output);
    }
    return text + ") -> ()";
  }
  if (outputs.size() == 1) return text + ") -> Tensor";
  std::string returned;
  for (size_t i = 0; i < outputs.size(); ++i) returned += i == 0 ? "Tensor" : ", Tensor";
  return text + ") -> (" + returned + ")";
}

const c10::OperatorHandle& Operator::handle() const {
  // Looked up on the first call, after all libraries have been loaded.
  static const auto handles = [] {
    std::vector<c10::OperatorHandle> found;
    for (const Operator& op : operators()) {
      const std::string in_schema = op.form == Form::in_place ? op.name + "_" : op.name;
      found.push_back(c10::Dispatcher::singleton().findSchemaOrThrow(
          ("collx::" + in_schema).c_str(), op.overload.c_str()));
    }
    return found;
  }();
  return handles.at(static_cast<size_t>(this - operators().data()));
}

NormResults Operator::planned() const {
  NormResults planned;
  for (const Output output : outputs) {
    planned.residual |= output == Output::residual;
    planned.quantized |= output == Output::quantized;
    planned.normalized |= output == Output::normalized || output == Output::out;
  }
  return planned;
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> list = make_operators();
  return list;
}

const Operator& functional_operator(std::string_view name, std::string_view overload) {
  const std::vector<Operator>& all = operators();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Operator& op) {
    return op.name == name && op.overload == overload && op.form == Form::functional;
  });
  TORCH_INTERNAL_ASSERT(found != all.end());
  return *found;
}

namespace {

/// Python passes None as an undefined tensor, also for an argument that is not optional.
void check_defined(const Operator& op, const IValue* values) {
  for (const size_t i : op.tensors) {
    TORCH_CHECK_TYPE(values[i].toTensor().defined(), "collx.", op.name, ": ",
                     op.handle().schema().arguments()[i].name(), ": got None; accepted: a tensor");
  }
}

}  // namespace

Arguments::Arguments(const Operator& op, const Stack& stack)
    : Arguments(op, stack.data() + (stack.size() - op.stack_size())) {
  check_defined(op, stack.data() + (stack.size() - op.stack_size()));
  if (!op.takes_outputs()) return;
  for (const IValue& value : torch::jit::last(stack, op.outputs.size())) {
    results.push_back(value.toTensor());
  }
}

Arguments::Arguments(const Operator& op, const IValue* values) : collective(op.collective) {
  for (const Argument argument : op.arguments) row_of(argument).set(*this, *values++);
}

Stack Arguments::values(const Operator& op) const {
  Stack list;
  list.reserve(op.arguments.size());
  for (const Argument argument : op.arguments) list.push_back(row_of(argument).get(*this));
  return list;
}

Stack call(const Operator& op, const Arguments& arguments) {
  Stack stack = arguments.values(op);
  op.handle().callBoxed(stack);
  return stack;
}

}  // namespace collx
