#include "map_operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

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

void mapped_into(Mapped mapped, Tensor& out) {
  Epilogue epilogue = epilogue_of(mapped);
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

Tensor mapped_meta(Mapped mapped) {
  const at::ScalarType result = mapped.check().result();
  return at::empty_symint(mapped.sizes, mapped.given.input.options().dtype(result));
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
  static Tensor reduce(const Given& g) {
    static const auto op =
        autograd::find_op<Tensor(const Tensor&, string_view, string_view, string_view, int64_t)>(
            "allreduce", "");
    return op.call(g.input, g.reduce_op, g.group_name, g.algorithm, g.max_blocks);
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
  static Tensor reduce(const Given& g) {
    static const auto op =
        autograd::find_op<Tensor(const Tensor&, string_view, int64_t, string_view, int64_t,
                                 string_view, int64_t)>("reducescatter", "");
    return op.call(g.input, g.reduce_op, g.group_size, g.group_name, g.axis, g.algorithm,
                   g.max_blocks);
  }
};

// --- an epilogue by itself
// ------------------------------------------------------------------------

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

/// The derivative is made from the value and the extras alone.
struct RecordedEpilogue : torch::autograd::Function<RecordedEpilogue> {
  static Tensor forward(autograd::AutogradContext* context, const Tensor& value,
                        c10::DispatchKeySet keys, string_view text, TensorList extras, int64_t axis,
                        int64_t start) {
    autograd::variable_list saved{value};
    saved.insert(saved.end(), extras.begin(), extras.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["text"] = std::string(text);
    context->saved_data["axis"] = axis;
    context->saved_data["start"] = start;
    return autograd::redispatch_below(epilogue_op(), keys, value, text, extras, axis, start);
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
    autograd::variable_list result{found[0], {}, {}};  // of the value, keys and text
    result.insert(result.end(), found.begin() + 1, found.end());
    result.resize(result.size() + 2);
    return result;
  }
};

Tensor epilogue_autograd(c10::DispatchKeySet keys, const Tensor& value, string_view text,
                         TensorList extras, int64_t axis, int64_t start) {
  refuse_forward_mode(kEpilogue, value, extras);
  if (wants_gradient(value, extras)) {
    return RecordedEpilogue::apply(value, keys, text, extras, axis, start);
  }
  return autograd::redispatch_below(epilogue_op(), keys, value, text, extras, axis, start);
}

// --- the forms of the two
// -------------------------------------------------------------------------

template <typename Op, typename Signature = typename Op::Functional>
struct Forms;

template <typename Op, typename... A>
struct Forms<Op, Tensor(A...)> {
  using Out = void(A..., Tensor&);

  static Tensor functional(A... a) { return mapped_new(Op::mapped(a...)); }
  static void out(A... a, Tensor& out) { mapped_into(Op::mapped(a...), out); }
  static Tensor functional_meta(A... a) { return mapped_meta(Op::mapped(a...)); }
  static void out_meta(A... a, Tensor& out) { check_result_meta(Op::mapped(a...), out); }

  /// Where a gradient is wanted, the reduction and the epilogue are operators of their own, each
  /// with its derivative: what is kept between them is the reduced value.
  static Tensor functional_autograd(c10::DispatchKeySet keys, A... a) {
    static const auto op = autograd::find_op<Tensor(A...)>(Op::kName, "");
    const Mapped mapped = Op::mapped(a...);
    refuse_forward_mode(Op::kName, mapped.given.input, mapped.extras);
    if (!wants_gradient(mapped.given.input, mapped.extras)) {
      return autograd::redispatch_below(op, keys, a...);
    }
    const auto known = check_expression(mapped.op(), mapped.text, mapped.given.input.scalar_type());
    const Origin origin = known->expression.indices > 0 ? origin_of(mapped.given) : Origin{};
    return epilogue_op().call(Op::reduce(mapped.given), mapped.text, mapped.extras, origin.axis,
                              origin.start);
  }
  static void out_autograd(c10::DispatchKeySet keys, A... a, Tensor& out) {
    const Mapped mapped = Op::mapped(a...);
    refuse_forward_mode(Op::kName, mapped.given.input, mapped.extras);
    autograd::refuse_gradient_of_out(Op::kName, mapped.given.input, out);
    for (const Tensor& extra : mapped.extras) {
      autograd::refuse_gradient_of_out(Op::kName, extra, out);
    }
    write_out(keys, a..., out);
  }
  static void write_out(c10::DispatchKeySet keys, A... a, Tensor& out) {
    static const auto op = autograd::find_op<Out>(Op::kName, "out");
    autograd::check_versioned(Op::kName, "out", out);
    autograd::redispatch_below(op, keys, a..., out);
    torch::autograd::increment_version(out);
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
  });
  library.impl(kEpilogue, torch::dispatch(key, TORCH_FN(epilogue)));
}

TORCH_LIBRARY_IMPL(collx, Meta, library) {
  for_each_map([&]<typename Op>(Op) {
    const std::string name = Op::kName;
    library.impl(name.c_str(), TORCH_FN(Forms<Op>::functional_meta));
    library.impl((name + ".out").c_str(), TORCH_FN(Forms<Op>::out_meta));
  });
  library.impl(kEpilogue, TORCH_FN(epilogue_meta));
}

TORCH_LIBRARY_IMPL(collx, Autograd, library) {
  for_each_map([&]<typename Op>(Op) {
    const std::string name = Op::kName;
    library.impl(name.c_str(), TORCH_FN(Forms<Op>::functional_autograd));
    library.impl((name + ".out").c_str(), TORCH_FN(Forms<Op>::out_autograd));
  });
  library.impl(kEpilogue, TORCH_FN(epilogue_autograd));
}

TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) {
  for_each_map([&]<typename Op>(Op) {
    library.impl((std::string(Op::kName) + ".out").c_str(), TORCH_FN(Forms<Op>::write_out));
  });
}

}  // namespace collx
