#include "derivative.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "../protocol/selection.h"
#include "epilogue.h"
#include "posting.h"

namespace collx {

namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::SavedVariable;
using torch::autograd::VariableInfo;
using torch::dynamo::autograd::IValuePacker;
using torch::jit::Stack;

/// The algorithm for a call on gradients. Gradients are not symmetric tensors, so an algorithm that
/// requires those is replaced by "auto".
std::string_view for_gradient(std::string_view algorithm) {
  const Algorithm asked = parse_algorithm(algorithm).value_or(Algorithm::automatic);
  return needs_symmetric(asked) ? name_of(Algorithm::automatic) : algorithm;
}

void refuse_reduce_op(const Arguments& a) {
  TORCH_CHECK_NOT_IMPLEMENTED(a.reduce_op == "sum" || a.reduce_op == "avg", "collx.", a.op(),
                              ": reduce_op: \"", a.reduce_op,
                              "\" has no backward; accepted if a gradient is required: sum, "
                              "avg (otherwise detach the input)");
}

Tensor first_of(const Operator& op, const Arguments& a) { return call(op, a).front().toTensor(); }

/// The sum over the ranks of the gradients of gathered parts.
Tensor sum_of_parts(Arguments a, const Tensor& gradient) {
  const Operator& op = functional_operator(Collective::reducescatter);
  a.reduce_op = "sum";
  if (!gradient.is_complex()) return first_of(op, a);
  // Complex tensors can be gathered but not reduced. Their sum is that of real and imaginary parts.
  a.input = at::view_as_real(gradient.resolve_conj());
  if (a.axis < 0) --a.axis;
  return at::view_as_complex(first_of(op, a));
}

/// `a`: the arguments of the call, with the gradient instead of the input.
Tensor adjoint(const Operator& op, Arguments a, const c10::SymInt& extent) {
  a.algorithm = for_gradient(a.algorithm);
  switch (op.collective) {
    case Collective::allreduce: refuse_reduce_op(a); return first_of(op, a);
    case Collective::reducescatter:
      refuse_reduce_op(a);
      if (a.reduce_op == "avg") a.input = a.input.div(a.group_size);
      if (extent % a.group_size != 0) a.total = extent;
      return first_of(functional_operator(Collective::allgather), a);
    case Collective::allgather: return sum_of_parts(a, a.input);
    case Collective::alltoall: return first_of(op, a);
    case Collective::alltoallv:
      // Sends the received rows back to their senders. With splits on the device, the gradient is
      // zero for rows that were not sent.
      std::swap(a.output_splits, a.input_splits);
      a.capacity = extent;
      return first_of(op, a);
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, "collx.", a.op(),
          ": has no backward, since not every rank would be certain to run it, but an input "
          "requires grad; accepted: a detached input, torch.no_grad(), or an operator with a "
          "backward (allreduce, reducescatter, allgather, alltoall, alltoallv)");
  }
}

variable_list of_epilogue(const Arguments& a, const Tensor& gradient) {
  const char* const op = "epilogue";
  const auto known = check_expression(op, a.expression, a.input.scalar_type());
  const auto bound = with_numbers(op, known->expression, a.numbers);
  return gradients(bound ? *bound : known->expression, a.input, a.extras, {a.axis, a.start},
                   gradient);
}

variable_list differentiate(const Operator& op, const Stack& values, const variable_list& saved,
                            const Tensor& gradient) {
  Arguments a(op, values.data());
  if (op.family == Family::epilogue) {
    a.input = saved.at(0);
    a.extras.assign(saved.begin() + 1, saved.end());
    return of_epilogue(a, gradient);
  }
  a.input = gradient;
  if (!saved.empty()) a.device_splits = saved.at(0);
  return {adjoint(op, std::move(a), values.back().toSymInt())};
}

Tensor defined(const Tensor& gradient, const VariableInfo& info) {
  at::OptionalDeviceGuard guard;
  return gradient.defined() ? gradient : info.zeros(guard);
}

/// Compiled autograd calls this function with the arguments that apply_with_saved packs.
variable_list apply_packed(const variable_list& gradients, const std::vector<IValue>& packed) {
  const Operator& op = functional_operator(packed[0].toStringRef(), packed[1].toStringRef());
  const auto info = IValuePacker<VariableInfo>::unpack(packed[2]);
  const auto values = packed.begin() + 3;
  const auto saved = values + static_cast<int64_t>(op.arguments.size()) + 1;
  variable_list tensors;
  for (auto tensor = saved; tensor != packed.end(); ++tensor) {
    tensors.push_back(tensor->toTensor());
  }
  return differentiate(op, Stack(values, saved), tensors, defined(gradients.at(0), info));
}

}  // namespace

Derivative::Derivative(const Operator& op, const Arguments& arguments)
    : op_(op), values_(arguments.values(op)) {
  for (IValue& value : values_) {
    if (value.isTensor() || value.isTensorList()) value = IValue();
  }
  values_.emplace_back(0);
}

void Derivative::attach(const Tensor& result, const c10::SymInt& extent,
                        const variable_list& saved) {
  values_.back() = extent;
  // A hook reads the tensor immediately, and a posted call may not have written it yet.
  if (!saved.empty() && at::SavedTensorDefaultHooks::get_hooks()) Posting::settle();
  for (const Tensor& tensor : saved) saved_.emplace_back(tensor, /*is_output=*/false);
  result_ = VariableInfo(result);
  if (torch::autograd::isDifferentiableType(result.scalar_type())) {
    torch::autograd::set_history(result, getptr());
  }
  fire_creation_hooks(getptr());
}

void Derivative::attach_in_place(const Tensor& written) {
  result_ = VariableInfo(written);
  torch::autograd::rebase_history(written, getptr());
  fire_creation_hooks(getptr());
}

std::string Derivative::name() const {
  std::string name = "collx_" + op_.full_name() + "_backward";
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

void Derivative::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (SavedVariable& tensor : saved_) tensor.reset_data();
}

variable_list Derivative::apply(variable_list&& gradients) {
  variable_list tensors;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const SavedVariable& tensor : saved_) tensors.push_back(tensor.unpack());
  }
  return differentiate(op_, values_, tensors, defined(gradients.at(0), result_));
}

void Derivative::compiled_args(torch::autograd::CompiledNodeArgs& args) const {
  args.collect(name());
  for (const IValue& value : values_) args.collect(value);
  args.collect(saved_, /*is_output=*/false);
  args.collect(result_);
}

variable_list Derivative::apply_with_saved(const variable_list& gradients,
                                           torch::autograd::SwapSavedVariables& saved) {
  for (IValue& value : values_) saved.before(value);
  saved.before(saved_);
  saved.before(result_);

  std::vector<IValue> packed{op_.name, op_.overload, IValuePacker<VariableInfo>::pack(result_)};
  packed.insert(packed.end(), values_.begin(), values_.end());
  for (const SavedVariable& tensor : saved_) packed.emplace_back(tensor.unpack());
  std::vector<at::TypePtr> types;
  for (const IValue& value : packed) {
    types.push_back(value.isTensor() ? at::TypePtr(at::TensorType::get()) : value.type());
  }
  const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
  const std::string bound =
      compiler->bind_function(saved.get_py_compiler(), name(), apply_packed, types,
                              /*is_custom_function=*/true, /*is_traceable=*/false);
  variable_list results = compiler->call_function(
      saved.get_py_compiler(), "apply_functional", bound, gradients, packed,
      IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          torch::dynamo::autograd::get_input_metadata(next_edges())));

  for (IValue& value : values_) saved.after(value);
  saved.after(saved_);
  saved.after(result_);
  return results;
}

}  // namespace collx
