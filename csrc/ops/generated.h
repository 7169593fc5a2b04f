// The kernels of an operator's forms, made from its row in operators.h.
#pragma once

#include <torch/library.h>

#include <string>

#include "collectives.h"
#include "operators.h"

namespace collx {

template <typename Op, typename Arguments = typename Op::Arguments>
struct Generated;

template <typename Op, typename... A>
struct Generated<Op, argument::List<A...>> {
  static Given given(const at::Tensor& input, const typename A::Type&... values) {
    Given g{Op::kCollective, input};
    (A::set(g, values), ...);
    return g;
  }

  static at::Tensor functional(const at::Tensor& input, typename A::Type... values) {
    return into_new(given(input, values...));
  }
  static void out(const at::Tensor& input, typename A::Type... values, at::Tensor& out) {
    const Given g = given(input, values...);
    return Op::kInPlace ? into_like(g, out) : into_apart(g, out);
  }
  static void inplace(at::Tensor& input, typename A::Type... values) {
    in_place(given(input, values...));
  }

  static at::Tensor functional_meta(const at::Tensor& input, typename A::Type... values) {
    return new_meta(given(input, values...));
  }
  static void out_meta(const at::Tensor& input, typename A::Type... values, at::Tensor& out) {
    check_out_meta(given(input, values...), out);
  }
  static void inplace_meta(at::Tensor& input, typename A::Type... values) {
    check_meta(given(input, values...));
  }

  static void define(torch::Library& library) {
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag,
                                       at::Tag::needs_contiguous_strides};
    const std::vector<at::Tag> out_tags = {tags[0], tags[1], at::Tag::out_variant};
    const std::string name = Op::kName, options = Op::Arguments::schema();
    library.def((name + "(Tensor input, " + options + ") -> Tensor").c_str(), tags);
    library.def((name + ".out(Tensor input, " + options + ", *, Tensor(a!) out) -> ()").c_str(),
                out_tags);
    if constexpr (Op::kInPlace) {
      library.def((name + "_(Tensor(a!) input, " + options + ") -> ()").c_str(), tags);
    }
  }

  static void add_kernels(torch::Library& library, c10::DispatchKey key) {
    const std::string name = Op::kName;
    library.impl(name.c_str(), torch::dispatch(key, TORCH_FN(functional)));
    library.impl((name + ".out").c_str(), torch::dispatch(key, TORCH_FN(out)));
    if constexpr (Op::kInPlace) {
      library.impl((name + "_").c_str(), torch::dispatch(key, TORCH_FN(inplace)));
    }
  }
  static void add_meta(torch::Library& library) {
    const std::string name = Op::kName;
    library.impl(name.c_str(), TORCH_FN(functional_meta));
    library.impl((name + ".out").c_str(), TORCH_FN(out_meta));
    if constexpr (Op::kInPlace) library.impl((name + "_").c_str(), TORCH_FN(inplace_meta));
  }
};

}  // namespace collx
