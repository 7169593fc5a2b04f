// The Autograd kernels of an operator with one input and one result, made from its row in
// operators.h and a formula:
//
//   template <>
//   struct Formula<operators::Allgather> : operators::Allgather, Differentiable {
//     static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient, ...);
//   };
//
// where backward takes the options of the call as the signature has them. Underneath are the parts
// that serve kernels of another shape as well.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "../protocol/names.h"
#include "../protocol/selection.h"
#include "operators.h"

namespace collx::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Looked up at the first call, when all libraries have been loaded.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const std::string& name, const char* overload) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("collx::" + name).c_str(), overload)
      .typed<Signature>();
}

/// To the kernels that do the work, below autograd and what counts versions.
template <typename Result, typename... Arguments>
Result redispatch_below(const c10::TypedOperatorHandle<Result(Arguments...)>& op,
                        c10::DispatchKeySet keys, std::type_identity_t<Arguments>... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.redispatch(keys & c10::after_ADInplaceOrView_keyset,
                       std::forward<Arguments>(arguments)...);
}

/// An argument that is written gets a new version, by which autograd finds out that a tensor it has
/// saved is no longer the same. PyTorch would refuse an inference tensor here, too, but only when
/// it has been written, and the peers have done their part.
inline void check_versioned(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.is_inference() || c10::InferenceMode::is_enabled(),
              "collx.", op, ": ", argument,
              ": got an inference tensor outside of torch.inference_mode(), which cannot be "
              "written there; accepted: any other tensor, or a call within that mode");
}

/// Before a function is recorded. C++ functions refuse transforms by themselves, but with words
/// that name neither the operator nor a cure, and after the collective where that runs first.
inline void refuse_transforms(const char* op) {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "collx.", op,
        ": input: got a tensor that a transform of torch.func differentiates (grad, vjp, jacrev); "
        "accepted: torch.autograd.grad or backward(), outside of all transforms, or a detached "
        "tensor");
  }
}

inline bool wants_gradient(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

/// `reverse` says in parentheses, with a space before, whether reverse mode works.
inline void refuse_forward_mode(const char* op, const char* reverse, const char* argument,
                                const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor), "collx.", op, ": ",
                              argument,
                              ": got a tensor with a forward-mode tangent; accepted: tensors "
                              "without one",
                              reverse);
}

inline void refuse_gradient_of_out(const char* op, const at::Tensor& input, const at::Tensor& out) {
  TORCH_CHECK(!wants_gradient(input) && !wants_gradient(out), "collx.", op, ": out: got ",
              wants_gradient(input) ? "an input" : "a tensor",
              " that requires grad; out= has no automatic differentiation, as nowhere in PyTorch. "
              "Accepted: the form without out=, or torch.no_grad()");
}

/// The algorithm for a call on gradients. These are not symmetric tensors, so what works on those
/// alone cannot be forced there.
inline std::string_view for_gradient(std::string_view algorithm) {
  const Algorithm asked = parse_algorithm(algorithm).value_or(Algorithm::automatic);
  return needs_symmetric(asked) ? name_of(Algorithm::automatic) : algorithm;
}

/// An option as the context keeps it. Each is an entry of its own, since compiled autograd takes
/// numbers within lists for constants.
template <typename T>
c10::IValue pack(const T& option) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return std::string(option);
  } else {
    return option;
  }
}

/// What the option's type can be made from; strings stay in the context.
template <typename T>
decltype(auto) unpack(const c10::IValue& value) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return value.toStringRef();
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return value.toInt();
  } else if constexpr (std::is_same_v<T, std::optional<c10::SymInt>>) {
    return value.isNone() ? std::nullopt : std::optional(value.toSymInt());
  } else {
    static_assert(std::is_same_v<T, c10::SymIntArrayRef>);
    return value.toSymIntVector();
  }
}

/// What a description says unless it says something else.
struct Differentiable {
  static constexpr const char* kReverse = " (reverse mode works)";
  /// What the formula needs besides the options.
  static void save(AutogradContext&, const at::Tensor& /*input*/, const auto&... /*options*/) {}
};

/// For operators where some rank's result may be unused, so that its backward never runs: a
/// formula that calls a collective would leave the others waiting.
template <typename Op>
struct NotDifferentiable : Differentiable {
  static constexpr const char* kReverse = "";
  static at::Tensor backward(const AutogradContext&, const at::Tensor&, const auto&...) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "collx.", Op::kName,
        ": has no backward: got a gradient, which not every rank's backward would be sure to pass "
        "on; accepted: a detached input, torch.no_grad(), or an operator that has one (allreduce, "
        "reducescatter, allgather, alltoall, alltoallv)");
  }
};

template <typename Op, typename Signature = typename Op::Signature>
struct Kernels;

template <typename Op>
struct Recorded : torch::autograd::Function<Recorded<Op>> {
  template <typename... Options>
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            c10::DispatchKeySet keys, Options... options) {
    at::Tensor result = redispatch_below(Kernels<Op>::functional_op(), keys, input, options...);
    Kernels<Op>::save(*context, input, options...);
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return Kernels<Op>::backward(*context, gradients.at(0));
  }
};

template <typename Op>
struct RecordedInplace : torch::autograd::Function<RecordedInplace<Op>> {
  template <typename... Options>
  static at::Tensor forward(AutogradContext* context, at::Tensor input, c10::DispatchKeySet keys,
                            Options... options) {
    redispatch_below(Kernels<Op>::inplace_op(), keys, input, options...);
    Kernels<Op>::save(*context, input, options...);
    context->mark_dirty({input});
    return input;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return Kernels<Op>::backward(*context, gradients.at(0));
  }
};

/// A result that has been computed already, with the derivative of the operator.
template <typename Op>
struct RecordedElsewhere : torch::autograd::Function<RecordedElsewhere<Op>> {
  template <typename... Options>
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor* result, Options... options) {
    Kernels<Op>::save(*context, input, options...);
    return *result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return Kernels<Op>::backward(*context, gradients.at(0));
  }
};

template <typename Op, typename... Options>
struct Kernels<Op, at::Tensor(const at::Tensor&, Options...)> {
  using Functional = at::Tensor(const at::Tensor&, Options...);
  using Out = void(const at::Tensor&, Options..., at::Tensor&);
  using Inplace = void(at::Tensor&, Options...);

  static const auto& functional_op() {
    static const auto op = find_op<Functional>(Op::kName, "");
    return op;
  }
  static const auto& out_op() {
    static const auto op = find_op<Out>(Op::kName, "out");
    return op;
  }
  static const auto& inplace_op() {
    static const auto op = find_op<Inplace>(std::string(Op::kName) + "_", "");
    return op;
  }

  static at::Tensor functional(c10::DispatchKeySet keys, const at::Tensor& input,
                               Options... options) {
    refuse_forward_mode(Op::kName, Op::kReverse, "input", input);
    if (!wants_gradient(input)) return redispatch_below(functional_op(), keys, input, options...);
    refuse_transforms(Op::kName);
    return Recorded<Op>::apply(input, keys, options...);
  }

  static void out(c10::DispatchKeySet keys, const at::Tensor& input, Options... options,
                  at::Tensor& out) {
    refuse_forward_mode(Op::kName, Op::kReverse, "input", input);
    refuse_forward_mode(Op::kName, Op::kReverse, "out", out);
    refuse_gradient_of_out(Op::kName, input, out);
    write_out(keys, input, options..., out);
  }

  /// The kernel below autograd, which is the first one in inference mode.
  static void write_out(c10::DispatchKeySet keys, const at::Tensor& input, Options... options,
                        at::Tensor& out) {
    check_versioned(Op::kName, "out", out);
    redispatch_below(out_op(), keys, input, options..., out);
    torch::autograd::increment_version(out);
  }

  static void inplace(c10::DispatchKeySet keys, at::Tensor& input, Options... options) {
    refuse_forward_mode(Op::kName, Op::kReverse, "input", input);
    if (wants_gradient(input)) {
      refuse_transforms(Op::kName);
      // Before anything is launched; the function's own check would come after.
      torch::autograd::check_inplace(input, /*requires_grad=*/true);
      RecordedInplace<Op>::apply(input, keys, options...);
      return;
    }
    write_inplace(keys, input, options...);
  }

  /// As write_out.
  static void write_inplace(c10::DispatchKeySet keys, at::Tensor& input, Options... options) {
    check_versioned(Op::kName, "input", input);
    redispatch_below(inplace_op(), keys, input, options...);
    torch::autograd::increment_version(input);
  }

  static void save(AutogradContext& context, const at::Tensor& input, const Options&... options) {
    size_t index = 0;
    ((context.saved_data[std::to_string(index++)] = pack(options)), ...);
    Op::save(context, input, options...);
  }

  static variable_list backward(const AutogradContext& context, const at::Tensor& gradient) {
    return backward(context, gradient, std::index_sequence_for<Options...>());
  }

 private:
  template <size_t... I>
  static variable_list backward(const AutogradContext& context, const at::Tensor& gradient,
                                std::index_sequence<I...>) {
    variable_list gradients(2 + sizeof...(Options));  // of input, keys and options
    gradients[0] = Op::backward(context, gradient,
                                unpack<Options>(context.saved_data.at(std::to_string(I)))...);
    return gradients;
  }
};

/// The result of an all-reduce or a reducescatter, which something else has computed, as if the
/// operator had done so.
at::Tensor as_if_reduced(const Given& given, const at::Tensor& result);

}  // namespace collx::autograd
