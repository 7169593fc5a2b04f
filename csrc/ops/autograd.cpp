// Autograd of the all-reduce operators: allreduce(sum) of the gradient for sum, avg for avg; the
// others have no formula that every rank's backward would be sure to run, and refuse by name.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "../protocol/names.h"
#include "../protocol/selection.h"

namespace collx {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

using Functional = at::Tensor(const at::Tensor&, std::string_view, std::string_view,
                              std::string_view, int64_t);
using Out = void(const at::Tensor&, std::string_view, std::string_view, std::string_view, int64_t,
                 at::Tensor&);
using Inplace = void(at::Tensor&, std::string_view, std::string_view, std::string_view, int64_t);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

const auto& functional_op() {
  static const auto op = find_op<Functional>("collx::allreduce", "");
  return op;
}
const auto& out_op() {
  static const auto op = find_op<Out>("collx::allreduce", "out");
  return op;
}
const auto& inplace_op() {
  static const auto op = find_op<Inplace>("collx::allreduce_", "");
  return op;
}

c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_autograd_keyset;
}

void refuse_forward_mode(const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor),
                              "collx.allreduce: ", argument,
                              ": got a tensor with a forward-mode tangent; accepted: tensors "
                              "without one (reverse mode works for sum and avg)");
}

void save_call(AutogradContext* context, std::string_view reduce_op, std::string_view group_name,
               std::string_view algorithm, int64_t max_blocks) {
  context->saved_data["reduce_op"] = std::string(reduce_op);
  context->saved_data["group_name"] = std::string(group_name);
  context->saved_data["algorithm"] = std::string(algorithm);
  context->saved_data["max_blocks"] = max_blocks;
}

variable_list reduce_gradient(AutogradContext* context, const variable_list& gradients) {
  const std::string reduce_op = context->saved_data["reduce_op"].toStringRef();
  TORCH_CHECK_NOT_IMPLEMENTED(reduce_op == "sum" || reduce_op == "avg",
                              "collx.allreduce: reduce_op: \"", reduce_op,
                              "\" has no backward; accepted where a gradient is asked for: sum, "
                              "avg (or detach the input)");
  std::string algorithm = context->saved_data["algorithm"].toStringRef();
  // Gradients are not symmetric tensors, so what works on those alone cannot be forced here.
  if (needs_symmetric(parse_algorithm(algorithm).value_or(Algorithm::automatic))) {
    algorithm = "auto";
  }
  at::Tensor gradient = functional_op().call(gradients.at(0), reduce_op,
                                             context->saved_data["group_name"].toStringRef(),
                                             algorithm, context->saved_data["max_blocks"].toInt());
  return {gradient, Variable(), Variable(), Variable(), Variable(), Variable()};
}

struct AllreduceFunction : torch::autograd::Function<AllreduceFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            std::string_view reduce_op, std::string_view group_name,
                            std::string_view algorithm, int64_t max_blocks,
                            c10::DispatchKeySet keys) {
    save_call(context, reduce_op, group_name, algorithm, max_blocks);
    const at::AutoDispatchBelowADInplaceOrView below;
    return functional_op().redispatch(keys, input, reduce_op, group_name, algorithm, max_blocks);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return reduce_gradient(context, gradients);
  }
};

struct AllreduceInplaceFunction : torch::autograd::Function<AllreduceInplaceFunction> {
  static at::Tensor forward(AutogradContext* context, at::Tensor input, std::string_view reduce_op,
                            std::string_view group_name, std::string_view algorithm,
                            int64_t max_blocks, c10::DispatchKeySet keys) {
    save_call(context, reduce_op, group_name, algorithm, max_blocks);
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      inplace_op().redispatch(keys, input, reduce_op, group_name, algorithm, max_blocks);
    }
    context->mark_dirty({input});
    return input;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return reduce_gradient(context, gradients);
  }
};

bool wants_gradient(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

at::Tensor allreduce_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                              std::string_view reduce_op, std::string_view group_name,
                              std::string_view algorithm, int64_t max_blocks) {
  refuse_forward_mode("input", input);
  if (wants_gradient(input)) {
    return AllreduceFunction::apply(input, reduce_op, group_name, algorithm, max_blocks,
                                    below_autograd(keys));
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return functional_op().redispatch(below_autograd(keys), input, reduce_op, group_name, algorithm,
                                    max_blocks);
}

void allreduce_out_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                            std::string_view reduce_op, std::string_view group_name,
                            std::string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  refuse_forward_mode("input", input);
  refuse_forward_mode("out", out);
  TORCH_CHECK(!wants_gradient(input) && !wants_gradient(out), "collx.allreduce: out: got ",
              wants_gradient(input) ? "an input" : "a tensor",
              " that requires grad; out= has no automatic differentiation, as nowhere in PyTorch. "
              "Accepted: the form without out=, or torch.no_grad()");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out_op().redispatch(below_autograd(keys), input, reduce_op, group_name, algorithm, max_blocks,
                        out);
  }
  torch::autograd::increment_version(out);
}

void allreduce_inplace_autograd(c10::DispatchKeySet keys, at::Tensor& input,
                                std::string_view reduce_op, std::string_view group_name,
                                std::string_view algorithm, int64_t max_blocks) {
  refuse_forward_mode("input", input);
  if (wants_gradient(input)) {
    // Before anything is launched; the function's own check would come after.
    torch::autograd::check_inplace(input, /*requires_grad=*/true);
    AllreduceInplaceFunction::apply(input, reduce_op, group_name, algorithm, max_blocks,
                                    below_autograd(keys));
    return;
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    inplace_op().redispatch(below_autograd(keys), input, reduce_op, group_name, algorithm,
                            max_blocks);
  }
  torch::autograd::increment_version(input);
}

}  // namespace

TORCH_LIBRARY_IMPL(collx, Autograd, library) {
  library.impl("allreduce", TORCH_FN(allreduce_autograd));
  library.impl("allreduce.out", TORCH_FN(allreduce_out_autograd));
  library.impl("allreduce_", TORCH_FN(allreduce_inplace_autograd));
}

}  // namespace collx
