#include "epilogue_operator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

#include "autograd_kernels.h"

namespace collx {

using at::Tensor;
using at::TensorList;
using std::string_view;
using Numbers = at::ArrayRef<double>;

bool wants_gradient(const Tensor& value, TensorList extras) {
  return autograd::wants_gradient(value) ||
         std::any_of(extras.begin(), extras.end(),
                     [](const Tensor& extra) { return autograd::wants_gradient(extra); });
}

void refuse_forward_mode(const char* op, const Tensor& value, TensorList extras) {
  autograd::refuse_forward_mode(op, " (reverse mode works)", "input", value);
  for (const Tensor& extra : extras) {
    autograd::refuse_forward_mode(op, " (reverse mode works)", "extras", extra);
  }
}

namespace {

constexpr const char* kEpilogue = "epilogue";

/// Of a tensor that begins at `start` along `axis` in the one whose coordinates are meant.
Tensor epilogue(const Tensor& value, string_view text, TensorList extras, int64_t axis,
                int64_t start, Numbers numbers) {
  const auto known = check_expression(kEpilogue, text, value.scalar_type());
  const auto bound = with_numbers(kEpilogue, known->expression, numbers);
  const Expression& expression = bound ? *bound : known->expression;
  check_extras(kEpilogue, expression, extras, value, value.sym_sizes());
  Tensor out = at::empty(value.sizes(), value.options().dtype(scalar_type_of(expression.result())));
  apply(expression, value, extras, {axis, start}, out);
  return out;
}

Tensor epilogue_meta(const Tensor& value, string_view text, TensorList extras, int64_t, int64_t,
                     Numbers numbers) {
  const auto known = check_expression(kEpilogue, text, value.scalar_type());
  with_numbers(kEpilogue, known->expression, numbers);
  check_extras(kEpilogue, known->expression, extras, value, value.sym_sizes());
  return at::empty_symint(value.sym_sizes(),
                          value.options().dtype(scalar_type_of(known->expression.result())));
}

using EpilogueSignature = Tensor(const Tensor&, string_view, TensorList, int64_t, int64_t, Numbers);

const auto& epilogue_op() {
  static const auto op = autograd::find_op<EpilogueSignature>(kEpilogue, "");
  return op;
}

/// The derivative is made from the value and the extras alone. `made`: the result, computed
/// already.
struct RecordedEpilogue : torch::autograd::Function<RecordedEpilogue> {
  static Tensor forward(autograd::AutogradContext* context, const Tensor& value, const Tensor* made,
                        string_view text, TensorList extras, int64_t axis, int64_t start,
                        const Numbers* numbers) {
    autograd::variable_list saved{value};
    saved.insert(saved.end(), extras.begin(), extras.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["text"] = std::string(text);
    context->saved_data["axis"] = axis;
    context->saved_data["start"] = start;
    context->saved_data["numbers"] = numbers->vec();
    return *made;
  }
  static autograd::variable_list backward(autograd::AutogradContext* context,
                                          const autograd::variable_list& incoming) {
    const autograd::variable_list saved = context->get_saved_variables();
    const Tensor& value = saved.at(0);
    const TensorList extras = TensorList(saved).slice(1);
    const auto& data = context->saved_data;
    const auto known =
        check_expression(kEpilogue, data.at("text").toStringRef(), value.scalar_type());
    const auto bound =
        with_numbers(kEpilogue, known->expression, data.at("numbers").toDoubleVector());
    const std::vector<Tensor> found =
        gradients(bound ? *bound : known->expression, value, extras,
                  {data.at("axis").toInt(), data.at("start").toInt()}, incoming.at(0));
    autograd::variable_list result{found[0], {}, {}};  // of the value, what was made, and the text
    result.insert(result.end(), found.begin() + 1, found.end());
    result.resize(result.size() + 3);  // the place, and the numbers
    return result;
  }
};

}  // namespace

Tensor as_if_applied(const Tensor& value, const Tensor& made, string_view text, TensorList extras,
                     Origin origin, Numbers numbers) {
  return RecordedEpilogue::apply(value, &made, text, extras, origin.axis, origin.start, &numbers);
}

namespace {

Tensor epilogue_autograd(c10::DispatchKeySet keys, const Tensor& value, string_view text,
                         TensorList extras, int64_t axis, int64_t start, Numbers numbers) {
  refuse_forward_mode(kEpilogue, value, extras);
  const bool recorded = wants_gradient(value, extras);
  if (recorded) autograd::refuse_transforms(kEpilogue);
  const Tensor made =
      autograd::redispatch_below(epilogue_op(), keys, value, text, extras, axis, start, numbers);
  if (!recorded) return made;
  return as_if_applied(value, made, text, extras, {axis, start}, numbers);
}

}  // namespace

void define_epilogue(torch::Library& library) {
  library.def(
      "epilogue(Tensor value, str expression, Tensor[] extras, int axis=0, int start=0, "
      "float[] numbers=[]) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

void add_epilogue_kernel(torch::Library& library, c10::DispatchKey key) {
  library.impl(kEpilogue, torch::dispatch(key, TORCH_FN(epilogue)));
}

TORCH_LIBRARY_IMPL(collx, Meta, library) { library.impl(kEpilogue, TORCH_FN(epilogue_meta)); }
TORCH_LIBRARY_IMPL(collx, Autograd, library) {
  library.impl(kEpilogue, TORCH_FN(epilogue_autograd));
}

}  // namespace collx
