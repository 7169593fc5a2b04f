// The table of operators: the arguments, results and forms of each one. Schemas, the kernels of
// every dispatch key and the derivatives follow from it.
//
// Options are positional with defaults, because keyword-only integers break AOTInductor. A form
// that writes to an argument returns nothing, because third-party operators must not return an
// alias of an argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/macros/Export.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../protocol/names.h"
#include "../protocol/norm_plan.h"

namespace collx {

/// The families of operators. All members of one share their kernels.
enum class Family : uint8_t {
  exchange,
  map,  // a reduction with an epilogue
  device_splits,
  norm,
  epilogue,
  barrier,
};

enum class Form : uint8_t { functional, out, in_place };

/// The arguments: the name, the member of Arguments that holds the value, and the text of the
/// schema. A list of tensors has no default in a schema.
#define COLLX_ARGUMENTS(ROW)                                          \
  ROW(input, input, "Tensor input")                                   \
  ROW(value, input, "Tensor value")                                   \
  ROW(residual, residual, "Tensor residual")                          \
  ROW(weight, weight, "Tensor weight")                                \
  ROW(bias, bias, "Tensor bias")                                      \
  ROW(eps, eps, "float eps")                                          \
  ROW(reduce_op, reduce_op, "str reduce_op")                          \
  ROW(root, root, "int root")                                         \
  ROW(output_splits, output_splits, "SymInt[] output_splits")         \
  ROW(input_splits, input_splits, "SymInt[] input_splits")            \
  ROW(device_splits, device_splits, "Tensor input_splits")            \
  ROW(capacity, capacity, "SymInt capacity")                          \
  ROW(expression, expression, "str expression")                       \
  ROW(extras, extras, "Tensor[] extras")                              \
  ROW(group_size, group_size, "int group_size")                       \
  ROW(group_name, group_name, "str group_name")                       \
  ROW(axis, axis, "int axis=0")                                       \
  ROW(total, total, "SymInt? total=None")                             \
  ROW(start, start, "int start=0")                                    \
  ROW(weight_offset, weight_offset, "float weight_offset=0.0")        \
  ROW(scale_ub, scale_ub, "float? scale_ub=None")                     \
  ROW(fp8_dtype, fp8_dtype, "str fp8_dtype=\"e4m3fn\"")               \
  ROW(scale_mode, scale_mode, "str scale_mode=\"row\"")               \
  ROW(scale, scale, "Tensor? scale=None")                             \
  ROW(quant_group_size, quant_group_size, "int quant_group_size=128") \
  ROW(ue8m0, ue8m0, "bool ue8m0=False")                               \
  ROW(scale_dtype, scale_dtype, "str scale_dtype=\"float32\"")        \
  ROW(scale_layout, scale_layout, "str scale_layout=\"row\"")         \
  ROW(rounding, rounding, "str rounding=\"fp32\"")                    \
  ROW(algorithm, algorithm, "str algorithm=\"auto\"")                 \
  ROW(max_blocks, max_blocks, "int max_blocks=0")                     \
  ROW(optional_expression, expression, "str expression=\"\"")         \
  ROW(optional_extras, extras, "Tensor[]? extras=None")               \
  ROW(numbers, numbers, "float[] numbers=[]")

#define COLLX_NAME(name, ...) name,
enum class Argument : uint8_t { COLLX_ARGUMENTS(COLLX_NAME) };
#undef COLLX_NAME

enum class Output : uint8_t { out, value, output_splits, quantized, scale, residual, normalized };

/// The name of an output as an argument of the forms with out=.
constexpr const char* name_of(Output output) {
  constexpr const char* kNames[] = {"out",       "value",        "output_splits", "q_out",
                                    "scale_out", "residual_out", "norm_out"};
  return kNames[static_cast<size_t>(output)];
}

using Results = c10::SmallVector<at::Tensor, 4>;

struct C10_EXPORT Operator {
  Family family;
  Collective collective;  // none for an epilogue
  Form form;
  std::string name;      // as in error messages: without the "_" of the in-place form
  std::string overload;  // "", "out", "keep_norm", ...
  std::vector<Argument> arguments;
  std::vector<Output> outputs;       // the last arguments, if the form is out
  std::vector<size_t> tensors = {};  // the positions of the arguments that must be tensors

  std::string schema() const;
  /// The dispatcher's name, without the namespace.
  std::string full_name() const;
  const c10::OperatorHandle& handle() const;

  bool takes_outputs() const { return form == Form::out; }
  size_t stack_size() const { return arguments.size() + (takes_outputs() ? outputs.size() : 0); }
  /// Whether the operator takes tensors. A barrier does not.
  bool has_tensors() const { return family != Family::barrier; }
  /// The results for which a fused normalization is planned. They do not follow from the addresses,
  /// because a rank without rows has none.
  NormResults planned() const;
};

/// All operators.
C10_EXPORT const std::vector<Operator>& operators();
/// The form of an operator that returns new tensors.
const Operator& functional_operator(std::string_view name, std::string_view overload = "");
inline const Operator& functional_operator(Collective collective, std::string_view overload = "") {
  return functional_operator(name_of(collective), overload);
}

/// The arguments of a call. Members that its operator does not have keep their defaults. String
/// views refer to the values from which the arguments were created.
struct Arguments {
  Collective collective = Collective::none;
  at::Tensor input, residual, weight, bias, device_splits;
  std::optional<at::Tensor> scale;
  std::string_view reduce_op, group_name, expression, fp8_dtype, rounding, algorithm;
  std::string_view scale_mode = "row", scale_dtype = "float32", scale_layout = "row";
  double eps = 0, weight_offset = 0;
  std::optional<double> scale_ub;
  int64_t root = -1, group_size = 0, axis = 0, start = 0, quant_group_size = 0, max_blocks = 0;
  bool ue8m0 = false;
  std::optional<c10::SymInt> total;
  c10::SymInt capacity = 0;
  std::vector<c10::SymInt> output_splits, input_splits;
  std::vector<at::Tensor> extras;
  std::vector<double> numbers;
  Results results;  // given as out=

  Arguments() = default;
  Arguments(const Operator& op, const torch::jit::Stack& stack);
  /// Reads the values of op.arguments.
  Arguments(const Operator& op, const c10::IValue* values);
  /// The values of op.arguments, in the same order.
  torch::jit::Stack values(const Operator& op) const;

  const char* op() const { return name_of(collective).data(); }
};

/// Calls an operator through the dispatcher.
torch::jit::Stack call(const Operator& op, const Arguments& arguments);

constexpr bool is_fp8(Collective c) { return row_of(c).quantized == Quantized::fp8; }
constexpr bool is_quantized(Collective c) { return row_of(c).quantized != Quantized::no; }

}  // namespace collx
