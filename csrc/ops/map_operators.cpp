#include "map_operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "autograd_kernels.h"
#include "call.h"
#include "checks.h"
#include "collectives.h"
#include "epilogue.h"
#include "registry.h"

namespace collx {

namespace {

using at::Tensor;
using at::TensorList;
using std::string_view;

/// What an operator reduces, and what it does with the result.
struct Mapped {
  Given given;
  string_view text;
  TensorList extras;
  std::shared_ptr<const KnownExpression> known = {};
  Sizes sizes = {};

  const char* op() const { return given.op(); }

  /// Without data: exact on any rank.
  Epilogue check() {
    known = check_expression(op(), text, given.input.scalar_type());
    sizes = check_meta(given);
    check_extras(op(), known->expression, extras, given.input, sizes);
    return {*known, extras};
  }
};

/// Where this rank's part begins along the axis that is scattered.
Origin origin_of(const Given& given) {
  if (given.collective == Collective::allreduce) return {};
  const int64_t axis = check_axis(given.op(), given.input, given.axis);
  const CommunicatorOptions& o = registry::require(given.op(), given.group_name)->options();
  const auto units = static_cast<uint64_t>(given.input.size(axis));
  return {axis, static_cast<int64_t>(partition(units, o.world_size, o.rank).start)};
}

/// To be carried out.
Epilogue epilogue_of(Mapped& mapped) {
  Epilogue epilogue = mapped.check();
  if (mapped.known->expression.indices > 0) epilogue.origin = origin_of(mapped.given);
  return epilogue;
}

Tensor mapped_new(Mapped mapped) {
  const Epilogue epilogue = epilogue_of(mapped);
  mapped.given.epilogue = &epilogue;
  return into_new(mapped.given);
}

/// `value`: where the reduced elements go, too, if they are wanted.
void mapped_into(Mapped mapped, Tensor& out, const Tensor* value = nullptr) {
  Epilogue epilogue = epilogue_of(mapped);
  epilogue.value = value;
  for (size_t i = 0; i < mapped.extras.size(); ++i) {
    const at::MemOverlapStatus overlap = at::get_overlap_status(mapped.extras[i], out);
    epilogue.apart = epilogue.apart && overlap == at::MemOverlapStatus::No;
    TORCH_CHECK_VALUE(
        overlap != at::MemOverlapStatus::Partial, "collx.", mapped.op(), ": extras[", i,
        "]: overlaps out partly, or in another order; accepted: out itself, or a tensor that "
        "shares nothing with it");
  }
  mapped.given.epilogue = &epilogue;
  if (mapped.given.collective == Collective::allreduce) {
    into_like(mapped.given, out);
  } else {
    into_apart(mapped.given, out);
  }
}

/// And the reduced value, of which a derivative is made.
std::tuple<Tensor, Tensor> mapped_with_value(Mapped mapped) {
  Epilogue epilogue = epilogue_of(mapped);
  const Tensor value = at::empty(C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(mapped.sizes)),
                                 mapped.given.input.options().requires_grad(false));
  epilogue.value = &value;
  mapped.given.epilogue = &epilogue;
  return {into_new(mapped.given), value};
}

void check_value(Mapped& mapped, const Tensor& value) {
  mapped.check();
  check_out(mapped.op(), mapped.given.input, mapped.sizes, value, "value");
}

void mapped_into_with_value(Mapped mapped, Tensor& out, const Tensor& value) {
  check_value(mapped, value);
  TORCH_CHECK_VALUE(value.is_contiguous(), "collx.", mapped.op(), ": value: got strides ",
                    value.strides(), "; accepted: a contiguous tensor");
  check_disjoint(mapped.op(), mapped.given.input, value, std::nullopt, "value");
  mapped_into(std::move(mapped), out, &value);
}

Tensor mapped_meta(Mapped mapped) {
  const at::ScalarType result = mapped.check().result();
  return at::empty_symint(mapped.sizes, mapped.given.input.options().dtype(result));
}

std::tuple<Tensor, Tensor> mapped_with_value_meta(Mapped mapped) {
  Tensor out = mapped_meta(mapped);
  return {std::move(out), at::empty_symint(check_meta(mapped.given), mapped.given.input.options())};
}

void check_result_meta(Mapped mapped, const Tensor& out) {
  const at::ScalarType result = mapped.check().result();
  check_out(mapped.op(), mapped.given.input, mapped.sizes, out, "out", result);
}

struct AllreduceMap {
  static constexpr const char* kName = "allreduce_map";
  static constexpr const char* kOptions =
      "Tensor input, str reduce_op, str expression, Tensor[] extras, str group_name, "
      "str algorithm=\"auto\", int max_blocks=0";
  using Functional = Tensor(const Tensor&, string_view, string_view, TensorList, string_view,
                            string_view, int64_t);

  static Mapped mapped(const Tensor& input, string_view reduce_op, string_view expression,
                       TensorList extras, string_view group_name, string_view algorithm,
                       int64_t max_blocks) {
    Given given{Collective::allreduce, input};
    given.reduce_op = reduce_op;
    given.group_name = group_name;
    given.algorithm = algorithm;
    given.max_blocks = max_blocks;
    return {given, expression, extras};
  }
};

struct ReducescatterMap {
  static constexpr const char* kName = "reducescatter_map";
  static constexpr const char* kOptions =
      "Tensor input, str reduce_op, str expression, Tensor[] extras, int group_size, "
      "str group_name, int axis=0, str algorithm=\"auto\", int max_blocks=0";
  using Functional = Tensor(const Tensor&, string_view, string_view, TensorList, int64_t,
                            string_view, int64_t, string_view, int64_t);

  static Mapped mapped(const Tensor& input, string_view reduce_op, string_view expression,
                       TensorList extras, int64_t group_size, string_view group_name, int64_t axis,
                       string_view algorithm, int64_t max_blocks) {
    Given given{Collective::reducescatter, input};
    given.reduce_op = reduce_op;
    given.group_size = group_size;
    given.group_name = group_name;
    given.axis = axis;
    given.algorithm = algorithm;
    given.max_blocks = max_blocks;
    return {given, expression, extras};
  }
};

// --- an epilogue by itself ---

constexpr const char* kEpilogue = "epilogue";

/// Of a tensor that begins at `start` along `axis` in the one whose coordinates are meant.
Tensor epilogue(const Tensor& value, string_view text, TensorList extras, int64_t axis,
                int64_t start) {
  const auto known = check_expression(kEpilogue, text, value.scalar_type());
  const Expression& expression = known->expression;
  check_extras(kEpilogue, expression, extras, value, value.sym_sizes());
  Tensor out = at::empty(value.sizes(), value.options().dtype(scalar_type_of(expression.result())));
  apply(expression, value, extras, {axis, start}, out);
  return out;
}

Tensor epilogue_meta(const Tensor& value, string_view text, TensorList extras, int64_t, int64_t) {
  const auto known = check_expression(kEpilogue, text, value.scalar_type());
  check_extras(kEpilogue, known->expression, extras, value, value.sym_sizes());
  return at::empty_symint(value.sym_sizes(),
                          value.options().dtype(scalar_type_of(known->expression.result())));
}

using EpilogueSignature = Tensor(const Tensor&, string_view, TensorList, int64_t, int64_t);

const auto& epilogue_op() {
  static const auto op = autograd::find_op<EpilogueSignature>(kEpilogue, "");
  return op;
}

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

/// The derivative is made from the value and the extras alone. `made`: the result, computed
/// already.
struct RecordedEpilogue : torch::autograd::Function<RecordedEpilogue> {
  static Tensor forward(autograd::AutogradContext* context, const Tensor& value, const Tensor* made,
                        string_view text, TensorList extras, int64_t axis, int64_t start) {
    autograd::variable_list saved{value};
    saved.insert(saved.end(), extras.begin(), extras.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["text"] = std::string(text);
    context->saved_data["axis"] = axis;
    context->saved_data["start"] = start;
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
    const std::vector<Tensor> found =
        gradients(known->expression, value, extras,
                  {data.at("axis").toInt(), data.at("start").toInt()}, incoming.at(0));
    autograd::variable_list result{found[0], {}, {}};  // of the value, what was made, and the text
    result.insert(result.end(), found.begin() + 1, found.end());
    result.resize(result.size() + 2);
    return result;
  }
};

Tensor epilogue_autograd(c10::DispatchKeySet keys, const Tensor& value, string_view text,
                         TensorList extras, int64_t axis, int64_t start) {
  refuse_forward_mode(kEpilogue, value, extras);
  const Tensor made =
      autograd::redispatch_below(epilogue_op(), keys, value, text, extras, axis, start);
  if (!wants_gradient(value, extras)) return made;
  return RecordedEpilogue::apply(value, &made, text, extras, axis, start);
}

// --- the forms of the two ---

template <typename Op, typename Signature = typename Op::Functional>
struct Forms;

template <typename Op>
std::string name_with_value() {
  return std::string(Op::kName) + "_with_value";
}

template <typename Op, typename... A>
struct Forms<Op, Tensor(A...)> {
  using Out = void(A..., Tensor&);
  using OutWithValue = void(A..., Tensor&, Tensor&);

  static Tensor functional(A... a) { return mapped_new(Op::mapped(a...)); }
  static void out(A... a, Tensor& out) { mapped_into(Op::mapped(a...), out); }
  static std::tuple<Tensor, Tensor> with_value(A... a) {
    return mapped_with_value(Op::mapped(a...));
  }
  static Tensor functional_meta(A... a) { return mapped_meta(Op::mapped(a...)); }
  static void with_value_out(A... a, Tensor& out, Tensor& value) {
    mapped_into_with_value(Op::mapped(a...), out, value);
  }
  static void with_value_out_meta(A... a, Tensor& out, Tensor& value) {
    Mapped mapped = Op::mapped(a...);
    check_value(mapped, value);
    check_result_meta(std::move(mapped), out);
  }
  static std::tuple<Tensor, Tensor> with_value_meta(A... a) {
    return mapped_with_value_meta(Op::mapped(a...));
  }
  static void out_meta(A... a, Tensor& out) { check_result_meta(Op::mapped(a...), out); }

  /// What is kept for a gradient is the reduced value, which the same kernel gives.
  static Tensor functional_autograd(c10::DispatchKeySet keys, A... a) {
    static const auto op = autograd::find_op<Tensor(A...)>(Op::kName, "");
    static const auto with_value =
        autograd::find_op<std::tuple<Tensor, Tensor>(A...)>(name_with_value<Op>(), "");
    const Mapped mapped = Op::mapped(a...);
    refuse_forward_mode(Op::kName, mapped.given.input, mapped.extras);
    if (!wants_gradient(mapped.given.input, mapped.extras)) {
      return autograd::redispatch_below(op, keys, a...);
    }
    const auto known = check_expression(mapped.op(), mapped.text, mapped.given.input.scalar_type());
    const Origin origin = known->expression.indices > 0 ? origin_of(mapped.given) : Origin{};
    const auto [made, value] = autograd::redispatch_below(with_value, keys, a...);
    return RecordedEpilogue::apply(autograd::as_if_reduced(mapped.given, value), &made, mapped.text,
                                   mapped.extras, origin.axis, origin.start);
  }
  /// By itself it has no derivative: that is of the operator which calls it.
  static std::tuple<Tensor, Tensor> with_value_autograd(c10::DispatchKeySet keys, A... a) {
    static const auto op =
        autograd::find_op<std::tuple<Tensor, Tensor>(A...)>(name_with_value<Op>(), "");
    const Mapped mapped = Op::mapped(a...);
    TORCH_CHECK_NOT_IMPLEMENTED(!wants_gradient(mapped.given.input, mapped.extras), "collx.",
                                name_with_value<Op>(), ": has no backward; accepted: ", Op::kName);
    return autograd::redispatch_below(op, keys, a...);
  }
  static void out_autograd(c10::DispatchKeySet keys, A... a, Tensor& out) {
    refuse_gradients(Op::mapped(a...), out);
    write_out(keys, a..., out);
  }
  static void with_value_out_autograd(c10::DispatchKeySet keys, A... a, Tensor& out,
                                      Tensor& value) {
    refuse_gradients(Op::mapped(a...), out);
    refuse_gradients(Op::mapped(a...), value);
    write_with_value_out(keys, a..., out, value);
  }
  static void write_out(c10::DispatchKeySet keys, A... a, Tensor& out) {
    static const auto op = autograd::find_op<Out>(Op::kName, "out");
    autograd::check_versioned(Op::kName, "out", out);
    autograd::redispatch_below(op, keys, a..., out);
    torch::autograd::increment_version(out);
  }
  static void write_with_value_out(c10::DispatchKeySet keys, A... a, Tensor& out, Tensor& value) {
    static const std::string name = name_with_value<Op>();
    static const auto op = autograd::find_op<OutWithValue>(name, "out");
    autograd::check_versioned(name.c_str(), "out", out);
    autograd::check_versioned(name.c_str(), "value", value);
    autograd::redispatch_below(op, keys, a..., out, value);
    torch::autograd::increment_version(out);
    torch::autograd::increment_version(value);
  }

 private:
  static void refuse_gradients(const Mapped& mapped, const Tensor& out) {
    refuse_forward_mode(Op::kName, mapped.given.input, mapped.extras);
    autograd::refuse_gradient_of_out(Op::kName, mapped.given.input, out);
    for (const Tensor& extra : mapped.extras) {
      autograd::refuse_gradient_of_out(Op::kName, extra, out);
    }
  }
};

template <typename F>
void for_each_map(F f) {
  f(AllreduceMap{});
  f(ReducescatterMap{});
}

}  // namespace

void define_maps(torch::Library& library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> out_tags = {tags[0], at::Tag::out_variant};
  for_each_map([&]<typename Op>(Op) {
    const std::string name = Op::kName, options = Op::kOptions;
    library.def((name + "(" + options + ") -> Tensor").c_str(), tags);
    library.def((name + ".out(" + options + ", *, Tensor(a!) out) -> ()").c_str(), out_tags);
    const std::string two = name_with_value<Op>();
    library.def((two + "(" + options + ") -> (Tensor, Tensor)").c_str(), tags);
    library.def((two + ".out(" + options + ", *, Tensor(a!) out, Tensor(b!) value) -> ()").c_str(),
                out_tags);
  });
  library.def(
      "epilogue(Tensor value, str expression, Tensor[] extras, int axis=0, int start=0) -> Tensor",
      tags);
}

void add_map_kernels(torch::Library& library, c10::DispatchKey key) {
  for_each_map([&]<typename Op>(Op) {
    const std::string name = Op::kName;
    library.impl(name.c_str(), torch::dispatch(key, TORCH_FN(Forms<Op>::functional)));
    library.impl((name + ".out").c_str(), torch::dispatch(key, TORCH_FN(Forms<Op>::out)));
    library.impl(name_with_value<Op>().c_str(),
                 torch::dispatch(key, TORCH_FN(Forms<Op>::with_value)));
    library.impl((name_with_value<Op>() + ".out").c_str(),
                 torch::dispatch(key, TORCH_FN(Forms<Op>::with_value_out)));
  });
  library.impl(kEpilogue, torch::dispatch(key, TORCH_FN(epilogue)));
}

TORCH_LIBRARY_IMPL(collx, Meta, library) {
  for_each_map([&]<typename Op>(Op) {
    const std::string name = Op::kName;
    library.impl(name.c_str(), TORCH_FN(Forms<Op>::functional_meta));
    library.impl((name + ".out").c_str(), TORCH_FN(Forms<Op>::out_meta));
    library.impl(name_with_value<Op>().c_str(), TORCH_FN(Forms<Op>::with_value_meta));
    library.impl((name_with_value<Op>() + ".out").c_str(),
                 TORCH_FN(Forms<Op>::with_value_out_meta));
  });
  library.impl(kEpilogue, TORCH_FN(epilogue_meta));
}

TORCH_LIBRARY_IMPL(collx, Autograd, library) {
  for_each_map([&]<typename Op>(Op) {
    const std::string name = Op::kName;
    library.impl(name.c_str(), TORCH_FN(Forms<Op>::functional_autograd));
    library.impl((name + ".out").c_str(), TORCH_FN(Forms<Op>::out_autograd));
    library.impl(name_with_value<Op>().c_str(), TORCH_FN(Forms<Op>::with_value_autograd));
    library.impl((name_with_value<Op>() + ".out").c_str(),
                 TORCH_FN(Forms<Op>::with_value_out_autograd));
  });
  library.impl(kEpilogue, TORCH_FN(epilogue_autograd));
}

TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) {
  for_each_map([&]<typename Op>(Op) {
    library.impl((std::string(Op::kName) + ".out").c_str(), TORCH_FN(Forms<Op>::write_out));
    library.impl((name_with_value<Op>() + ".out").c_str(),
                 TORCH_FN(Forms<Op>::write_with_value_out));
  });
}

}  // namespace collx
