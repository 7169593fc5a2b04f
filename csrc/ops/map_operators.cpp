#include "map_operators.h"

#include <string>
#include <tuple>

#include "autograd_kernels.h"
#include "epilogue_operator.h"
#include "mapped.h"

namespace collx {

namespace {

using at::Tensor;
using at::TensorList;
using std::string_view;
using Numbers = at::ArrayRef<double>;

struct AllreduceMap {
  static constexpr const char* kName = "allreduce_map";
  static constexpr const char* kOptions =
      "Tensor input, str reduce_op, str expression, Tensor[] extras, str group_name, "
      "str algorithm=\"auto\", int max_blocks=0, "
      "float[] numbers=[]";
  using Functional = Tensor(const Tensor&, string_view, string_view, TensorList, string_view,
                            string_view, int64_t, Numbers);

  static Mapped mapped(const Tensor& input, string_view reduce_op, string_view expression,
                       TensorList extras, string_view group_name, string_view algorithm,
                       int64_t max_blocks, Numbers numbers) {
    Given given{Collective::allreduce, input};
    given.reduce_op = reduce_op;
    given.group_name = group_name;
    given.algorithm = algorithm;
    given.max_blocks = max_blocks;
    return {given, expression, extras, numbers};
  }
};

struct ReducescatterMap {
  static constexpr const char* kName = "reducescatter_map";
  static constexpr const char* kOptions =
      "Tensor input, str reduce_op, str expression, Tensor[] extras, int group_size, "
      "str group_name, int axis=0, str algorithm=\"auto\", int max_blocks=0, "
      "float[] numbers=[]";
  using Functional = Tensor(const Tensor&, string_view, string_view, TensorList, int64_t,
                            string_view, int64_t, string_view, int64_t, Numbers);

  static Mapped mapped(const Tensor& input, string_view reduce_op, string_view expression,
                       TensorList extras, int64_t group_size, string_view group_name, int64_t axis,
                       string_view algorithm, int64_t max_blocks, Numbers numbers) {
    Given given{Collective::reducescatter, input};
    given.reduce_op = reduce_op;
    given.group_size = group_size;
    given.group_name = group_name;
    given.axis = axis;
    given.algorithm = algorithm;
    given.max_blocks = max_blocks;
    return {given, expression, extras, numbers};
  }
};

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
    autograd::refuse_transforms(Op::kName);
    const auto known = check_expression(mapped.op(), mapped.text, mapped.given.input.scalar_type());
    const Origin origin = known->expression.indices > 0 ? origin_of(mapped.given) : Origin{};
    const auto [made, value] = autograd::redispatch_below(with_value, keys, a...);
    return as_if_applied(autograd::as_if_reduced(mapped.given, value), made, mapped.text,
                         mapped.extras, origin, mapped.numbers);
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
    refuse_gradients(Op::kName, Op::mapped(a...), out);
    write_out(keys, a..., out);
  }
  static void with_value_out_autograd(c10::DispatchKeySet keys, A... a, Tensor& out,
                                      Tensor& value) {
    static const std::string name = name_with_value<Op>();
    refuse_gradients(name.c_str(), Op::mapped(a...), out);
    refuse_gradients(name.c_str(), Op::mapped(a...), value);
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
  static void refuse_gradients(const char* op, const Mapped& mapped, const Tensor& out) {
    refuse_forward_mode(op, mapped.given.input, mapped.extras);
    autograd::refuse_gradient_of_out(op, mapped.given.input, out);
    for (const Tensor& extra : mapped.extras) {
      autograd::refuse_gradient_of_out(op, extra, out);
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
}

TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) {
  for_each_map([&]<typename Op>(Op) {
    library.impl((std::string(Op::kName) + ".out").c_str(), TORCH_FN(Forms<Op>::write_out));
    library.impl((name_with_value<Op>() + ".out").c_str(),
                 TORCH_FN(Forms<Op>::write_with_value_out));
  });
}

}  // namespace collx
