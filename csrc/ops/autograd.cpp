// The kernels of all operators for the dispatch keys Autograd and ADInplaceOrView.
#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives.h"
#include "derivative.h"

namespace collx {

namespace {

using at::Tensor;
using torch::jit::Stack;

bool wants_gradient(const Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

/// Calls f(argument, tensor) for every tensor of a call, including those in lists.
template <typename F>
void for_each_tensor(const c10::OperatorHandle& handle, const Stack& stack, F f) {
  const std::vector<c10::Argument>& arguments = handle.schema().arguments();
  const c10::IValue* value = stack.data() + (stack.size() - arguments.size());
  for (const c10::Argument& argument : arguments) {
    if (value->isTensor()) {
      f(argument, value->toTensor());
    } else if (value->isList() && value->isTensorList()) {
      for (const c10::IValue& item : value->toListRef()) f(argument, item.toTensor());
    }
    ++value;
  }
}

/// Whether f(tensor) holds for any tensor of a call.
template <typename F>
bool any_tensor(const c10::OperatorHandle& handle, const Stack& stack, F f) {
  bool any = false;
  for_each_tensor(handle, stack,
                  [&](const c10::Argument&, const Tensor& tensor) { any |= f(tensor); });
  return any;
}

/// Whether a tensor may have a gradient or a tangent: without this data it has neither.
bool any_has_autograd_data(const c10::OperatorHandle& handle, const Stack& stack) {
  return any_tensor(handle, stack, [](const Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr;
  });
}

/// Redispatches below Autograd and ADInplaceOrView, to the kernels of the backends.
C10_ALWAYS_INLINE void redispatch_below(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                                        Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  handle.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

/// Checks an argument that the call writes. Its version is incremented after the write, by which
/// autograd detects that a saved tensor has changed. PyTorch would also reject an inference tensor,
/// but only after the write, when the peers have already executed the call.
void check_versioned(const Operator& op, const char* argument, const Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.is_inference() || c10::InferenceMode::is_enabled(),
              "collx.", op.name, ": ", argument,
              ": got an inference tensor, which cannot be written outside of "
              "torch.inference_mode(); accepted: any other tensor, or a call within that mode");
}

/// The kernel for ADInplaceOrView, below autograd. In inference mode it is the first kernel.
void write(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           Stack* stack) {
  Results written;
  if (op.form == Form::in_place) {
    written.push_back((stack->end() - static_cast<int64_t>(op.stack_size()))->toTensor());
    check_versioned(op, "input", written[0]);
  } else if (op.takes_outputs()) {
    for (const c10::IValue& value : torch::jit::last(*stack, op.outputs.size())) {
      check_versioned(op, name_of(op.outputs[written.size()]), value.toTensor());
      written.push_back(value.toTensor());
    }
  }
  redispatch_below(handle, keys, stack);
  for (const Tensor& tensor : written) torch::autograd::increment_version(tensor);
}

bool is_differentiable(const Operator& op) {
  return op.family == Family::epilogue || has_adjoint(op.collective);
}

/// Part of an error message that says whether reverse mode works, with a leading space.
const char* reverse_mode(const Operator& op) {
  if (!is_differentiable(op)) return "";
  const bool reduces = op.family == Family::exchange && is_reduction(op.collective);
  return reduces ? " (reverse mode works for sum and avg)" : " (reverse mode works)";
}

void refuse_forward_mode(const Operator& op, const c10::OperatorHandle& handle,
                         const Stack& stack) {
  for_each_tensor(handle, stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor), "collx.", op.name, ": ",
                                argument.name(),
                                ": got a tensor with a forward-mode tangent; accepted: tensors "
                                "without one",
                                reverse_mode(op));
  });
}

void refuse_gradients_of_out(const Operator& op, const c10::OperatorHandle& handle,
                             const Stack& stack) {
  for_each_tensor(handle, stack, [&](const c10::Argument& argument, const Tensor& tensor) {
    TORCH_CHECK(!wants_gradient(tensor), "collx.", op.name, ": out: got ",
                argument.is_out() ? "a tensor" : "an input",
                " that requires grad; out= does not support automatic differentiation, as in "
                "PyTorch; accepted: the form without out=, or torch.no_grad()");
  });
}

/// The fused normalizations have no backward: a call that requires a gradient fails immediately.
void refuse_gradients_of_norm(const Operator& op, const c10::OperatorHandle& handle,
                              const Stack& stack) {
  for_each_tensor(handle, stack, [&](const c10::Argument&, const Tensor& tensor) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor.defined() || (!wants_gradient(tensor) && !torch::autograd::isFwGradDefined(tensor)),
        "collx.", op.name,
        ": does not support automatic differentiation, but an argument requires grad or has a "
        "tangent; accepted: detached arguments, torch.no_grad(), or the unfused sequence "
        "(collx.nn.unfused_rmsnorm)");
  });
}

/// torch.func runs the backward immediately, after the collective. So a call without a derivative
/// is rejected before the collective.
void refuse_transforms(const Operator& op) {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "collx.", op.name,
        ": input: got a tensor that a transform of torch.func differentiates (grad, vjp, jacrev), "
        "and this operator has no derivative; accepted: a detached tensor, or an operator that "
        "has one (allreduce, reducescatter, allgather, alltoall, alltoallv)");
  }
}

/// The input's size along the divided axis, which does not follow from the shape of the result.
c10::SymInt extent_of(const Operator& op, const Arguments& a) {
  if (op.family == Family::device_splits) return a.input.sym_size(0);
  return op.collective == Collective::reducescatter ? a.input.sym_size(a.axis) : 0;
}

/// Records the derivative of a reduction or copy. `result` is the result of the call with `a`.
void record_exchange(const Operator& op, const Arguments& a, const Tensor& result,
                     const variable_list& saved) {
  const auto node = make_node<Derivative>(op, a);
  node->set_next_edges(torch::autograd::collect_next_edges(a.input));
  node->attach(result, extent_of(op, a), saved);
}

void record_epilogue(const Arguments& a, const Tensor& result) {
  const auto node = make_node<Derivative>(functional_operator("epilogue"), a);
  node->set_next_edges(torch::autograd::collect_next_edges(a.input, at::TensorList(a.extras)));
  variable_list saved{a.input};
  saved.insert(saved.end(), a.extras.begin(), a.extras.end());
  node->attach(result, 0, saved);
}

/// Calls the form that also returns the reduced value, which the derivative of the epilogue needs.
/// Of nested transforms of torch.func, the outer one differentiates that form.
void record_map(const Operator& op, Arguments a, c10::DispatchKeySet keys, Stack* stack) {
  const bool keeps_value = op.outputs.size() == 2;
  const Operator& with_value = keeps_value ? op : functional_operator(op.name + "_with_value");
  const auto known = check_expression(a.op(), a.expression, a.input.scalar_type());
  const Origin origin = known->expression.indices > 0 ? origin_of(a) : Origin{};
  redispatch_below(with_value.handle(), keys, stack);
  const Tensor value = torch::jit::pop(*stack).toTensor();
  const Tensor result = stack->back().toTensor();
  if (wants_gradient(a.input)) {
    record_exchange(functional_operator(a.collective), a, value, {});
  }
  a.input = value;
  a.axis = origin.axis;
  a.start = origin.start;
  record_epilogue(a, result);
  if (keeps_value) stack->emplace_back(value);
}

void record_in_place(const Operator& op, const Arguments& a, const c10::OperatorHandle& handle,
                     c10::DispatchKeySet keys, Stack* stack) {
  torch::autograd::check_inplace(a.input, /*requires_grad=*/true);
  const auto node = make_node<Derivative>(functional_operator(op.collective), a);
  node->set_next_edges(torch::autograd::collect_next_edges(a.input));
  write(op, handle, keys, stack);
  node->attach_in_place(a.input);
}

void record(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
            Stack* stack) {
  // The string views in `a` refer to these copies, since the call removes the originals from the
  // stack.
  const auto values = torch::jit::last(*stack, op.stack_size());
  const Stack kept(values.begin(), values.end());
  const Arguments a(op, kept);
  if (op.form == Form::in_place) return record_in_place(op, a, handle, keys, stack);
  if (op.family == Family::map) return record_map(op, a, keys, stack);
  redispatch_below(handle, keys, stack);
  const auto results = torch::jit::last(*stack, op.outputs.size());
  const Tensor& result = results[0].toTensor();
  if (op.family == Family::epilogue) return record_epilogue(a, result);
  const bool splits = op.family == Family::device_splits;
  record_exchange(op, a, result, splits ? variable_list{results[1].toTensor()} : variable_list());
}

void autograd(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
              Stack* stack) {
  if (!any_has_autograd_data(handle, *stack)) return write(op, handle, keys, stack);
  if (op.family == Family::norm) {
    refuse_gradients_of_norm(op, handle, *stack);
    return write(op, handle, keys, stack);
  }
  refuse_forward_mode(op, handle, *stack);
  if (!any_tensor(handle, *stack, wants_gradient)) return write(op, handle, keys, stack);
  if (op.takes_outputs()) refuse_gradients_of_out(op, handle, *stack);
  if (!is_differentiable(op)) refuse_transforms(op);
  record(op, handle, keys, stack);
}

/// A kernel of an operator that calls one of the functions in this file.
template <auto kFunction>
class Layer final : public c10::OperatorKernel {
 public:
  explicit Layer(const Operator& op) : op_(op) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    kFunction(op_, handle, keys, stack);
  }

 private:
  const Operator& op_;
};

template <auto kFunction>
void add_layer(torch::Library& library, const Operator& op) {
  auto layer = std::make_unique<Layer<kFunction>>(op);
  library.impl(op.full_name().c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(layer)));
}

}  // namespace

TORCH_LIBRARY_IMPL(collx, Autograd, library) {
  for (const Operator& op : operators()) {
    if (op.has_tensors()) add_layer<autograd>(library, op);
  }
}

TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) {
  for (const Operator& op : operators()) {
    if (op.form != Form::functional) add_layer<write>(library, op);
  }
}

}  // namespace collx
