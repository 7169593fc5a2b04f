#include "shared_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "operator_table.h"
#include "posting.h"

namespace collx {

namespace {

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// The name in error messages: without the namespace, the overload, and the "_" of the in-place
/// form.
std::string name_of(const c10::OperatorHandle& op) {
  std::string name = op.schema().name().substr(op.schema().name().rfind(':') + 1);
  if (name.back() == '_') name.pop_back();
  return name;
}

bool has_bits(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

at::Tensor resolved(const at::Tensor& tensor) {
  return has_bits(tensor) ? tensor.resolve_conj().resolve_neg() : tensor;
}

/// The tensor under a view, without the conjugate and negative bits.
at::Tensor memory_of(const at::Tensor& view) {
  const at::Tensor memory = view.is_conj() ? at::_conj(view) : view;
  return memory.is_neg() ? at::_neg_view(memory) : memory;
}

/// The kernel for the Conjugate and Negative keys. PyTorch's own fallback expects that an operator
/// returns the argument that it writes; these operators return nothing.
///
/// A form with out= gets the tensor under the view, and its result is conjugated or negated
/// afterwards. So checks of overlap and lookups of symmetric memory use the memory that the caller
/// passed. An in-place form also reads its argument, and gets a copy.
void call_without_bits(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  c10::IValue* const values = stack->data() + (stack->size() - arguments.size());
  std::vector<std::pair<at::Tensor, at::Tensor>> outs, in_place;  // a view, and its replacement
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = values[i];
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(resolved(tensor));
      value = std::move(list);
    }
    if (!value.isTensor() || !has_bits(value.toTensor())) continue;
    const at::Tensor tensor = value.toTensor();
    if (!is_written(arguments[i])) {
      value = resolved(tensor);
      continue;
    }
    // A posted call writes after this function has returned.
    TORCH_CHECK_NOT_IMPLEMENTED(
        Posting::current() == nullptr, "collx.", name_of(op), ": ", arguments[i].name(),
        ": an asynchronous call cannot write a conjugate or negative view; accepted: another "
        "tensor, or a synchronous call");
    if (arguments[i].kwarg_only()) {
      value = outs.emplace_back(tensor, memory_of(tensor)).second;
    } else {
      check_writable(name_of(op).c_str(), arguments[i].name().c_str(), tensor);
      value = in_place.emplace_back(tensor, resolved(tensor)).second;
    }
  }
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Conjugate),
      stack);
  for (const auto& [view, memory] : outs) {
    if (view.is_conj()) memory.conj_physical_();
    if (view.is_neg()) memory.neg_();
  }
  for (const auto& [view, copy] : in_place) view.copy_(copy);
}

/// Whether PyTorch has no fallback for vmap, which calls an operator once for each element of the
/// batch.
bool lacks_vmap(const c10::FunctionSchema& schema) {
  return schema.is_mutable() ||
         std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& argument) {
                       return *argument.type() == *c10::ListType::ofTensors();
                     });
}

void refuse_vmap(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                 torch::jit::Stack* /*stack*/) {
  const c10::FunctionSchema& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "collx.", name_of(op), ": got a batch of torch.func.vmap, which this operator ",
      schema.is_mutable()
          ? "cannot write in its in-place and out= forms; accepted in vmap: the "
            "form that returns a new tensor"
          : "does not support; accepted: a loop over the batch, or the whole batch as "
            "one tensor");
}

/// vmap for operators whose result elements each depend on one input element: the batch becomes one
/// more dimension of a single collective.
void batch_as_one(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                  torch::jit::Stack* stack) {
  c10::IValue& input = *(stack->end() - static_cast<int64_t>(op.schema().arguments().size()));
  const at::Tensor given = input.toTensor();
  const auto* const batch = at::functorch::maybeGetBatchedImpl(given);
  if (batch != nullptr) input = batch->value();
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  op.callBoxed(stack);
  if (batch == nullptr) return;
  stack->back() =
      at::functorch::makeBatched(stack->back().toTensor(), batch->bdim(), batch->level());
}

bool is_elementwise(const Operator& op) {
  return op.family == Family::exchange && op.form == Form::functional && sends_all(op.collective);
}

}  // namespace

void add_shared_kernels(torch::Library& library) {
  using c10::DispatchKey;
  using torch::CppFunction;
  for (const Operator& op : operators()) {
    const std::string name = op.full_name();
    // Negative comes before Conjugate. Whichever kernel runs first resolves both bits.
    for (const DispatchKey key : {DispatchKey::Negative, DispatchKey::Conjugate}) {
      library.impl(name.c_str(),
                   torch::dispatch(key, CppFunction::makeFromBoxedFunction<&call_without_bits>()));
    }
    const auto batched = [&](CppFunction kernel) {
      library.impl(name.c_str(), torch::dispatch(DispatchKey::FuncTorchBatched, std::move(kernel)));
    };
    if (is_elementwise(op)) {
      batched(CppFunction::makeFromBoxedFunction<&batch_as_one>());
    } else if (lacks_vmap(op.handle().schema())) {
      batched(CppFunction::makeFromBoxedFunction<&refuse_vmap>());
    }
  }
}

}  // namespace collx
