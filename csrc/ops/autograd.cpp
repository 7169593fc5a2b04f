// Autograd of the collective operators: one formula each, which calls the operator that is the
// adjoint. What has no formula that every rank's backward would be sure to run refuses by name.
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

#include "autograd_kernels.h"
#include "operators.h"

namespace collx {

namespace {

using autograd::AutogradContext;
using autograd::Differentiable;
using autograd::for_gradient;
using autograd::Kernels;
using autograd::NotDifferentiable;
using autograd::RecordedElsewhere;

void refuse_reduce_op(const char* op, std::string_view reduce_op) {
  TORCH_CHECK_NOT_IMPLEMENTED(reduce_op == "sum" || reduce_op == "avg", "collx.", op,
                              ": reduce_op: \"", reduce_op,
                              "\" has no backward; accepted where a gradient is asked for: sum, "
                              "avg (or detach the input)");
}

/// Where nothing else is said, below, there is none.
template <typename Op>
struct Formula : Op, NotDifferentiable<Op> {};

template <>
struct Formula<operators::Allreduce> : operators::Allreduce, Differentiable {
  static constexpr const char* kReverse = " (reverse mode works for sum and avg)";
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient,
                             std::string_view reduce_op, std::string_view group_name,
                             std::string_view algorithm, int64_t max_blocks) {
    refuse_reduce_op(kName, reduce_op);
    return Kernels<Formula<operators::Allreduce>>::functional_op().call(
        gradient, reduce_op, group_name, for_gradient(algorithm), max_blocks);
  }
};

template <>
struct Formula<operators::Reducescatter> : operators::Reducescatter, Differentiable {
  static constexpr const char* kReverse = " (reverse mode works for sum and avg)";
  static void save(AutogradContext& context, const at::Tensor& input, std::string_view, int64_t,
                   std::string_view, int64_t axis, std::string_view, int64_t) {
    context.saved_data["total"] = input.sym_size(axis);
  }
  static at::Tensor backward(const AutogradContext& context, const at::Tensor& gradient,
                             std::string_view reduce_op, int64_t group_size,
                             std::string_view group_name, int64_t axis, std::string_view algorithm,
                             int64_t max_blocks);
};

template <>
struct Formula<operators::Allgather> : operators::Allgather, Differentiable {
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient, int64_t group_size,
                             std::string_view group_name, int64_t axis,
                             const std::optional<c10::SymInt>& /*the gradient's size says it*/,
                             std::string_view algorithm, int64_t max_blocks) {
    const auto sum = [&](const at::Tensor& parts, int64_t along) {
      return Kernels<Formula<operators::Reducescatter>>::functional_op().call(
          parts, "sum", group_size, group_name, along, for_gradient(algorithm), max_blocks);
    };
    if (!gradient.is_complex()) return sum(gradient, axis);
    // Complex numbers can be gathered but not reduced; their sum is that of the two parts.
    return at::view_as_complex(
        sum(at::view_as_real(gradient.resolve_conj()), axis < 0 ? axis - 1 : axis));
  }
};

at::Tensor Formula<operators::Reducescatter>::backward(
    const AutogradContext& context, const at::Tensor& gradient, std::string_view reduce_op,
    int64_t group_size, std::string_view group_name, int64_t axis, std::string_view algorithm,
    int64_t max_blocks) {
  refuse_reduce_op(kName, reduce_op);
  std::optional<c10::SymInt> total = context.saved_data.at("total").toSymInt();
  if (*total % group_size == 0) total.reset();
  return Kernels<Formula<operators::Allgather>>::functional_op().call(
      reduce_op == "avg" ? gradient.div(group_size) : gradient, group_size, group_name, axis,
      std::move(total), for_gradient(algorithm), max_blocks);
}

template <>
struct Formula<operators::Alltoall> : operators::Alltoall, Differentiable {
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient, int64_t group_size,
                             std::string_view group_name, std::string_view algorithm,
                             int64_t max_blocks) {
    return Kernels<Formula<operators::Alltoall>>::functional_op().call(
        gradient, group_size, group_name, for_gradient(algorithm), max_blocks);
  }
};

template <>
struct Formula<operators::Alltoallv> : operators::Alltoallv, Differentiable {
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient,
                             c10::SymIntArrayRef output_splits, c10::SymIntArrayRef input_splits,
                             std::string_view group_name, std::string_view algorithm,
                             int64_t max_blocks) {
    // What was received goes back to where it came from.
    return Kernels<Formula<operators::Alltoallv>>::functional_op().call(
        gradient, /*output_splits=*/input_splits,
        /*input_splits=*/output_splits, group_name, for_gradient(algorithm), max_blocks);
  }
};

/// What the kernels of an operator are in each of the two libraries below.
enum class Layer : uint8_t { autograd, versions };

template <typename Op>
void add_kernels(torch::Library& library, Layer layer) {
  using K = Kernels<Formula<Op>>;
  const std::string name = Op::kName, out = name + ".out", in_place = name + "_";
  if (layer == Layer::autograd) {
    library.impl(name.c_str(), TORCH_FN(K::functional));
    library.impl(out.c_str(), TORCH_FN(K::out));
    if constexpr (Op::kInPlace) library.impl(in_place.c_str(), TORCH_FN(K::inplace));
  } else {
    library.impl(out.c_str(), TORCH_FN(K::write_out));
    if constexpr (Op::kInPlace) library.impl(in_place.c_str(), TORCH_FN(K::write_inplace));
  }
}

void add_all_kernels(torch::Library& library, Layer layer) {
  operators::for_each([&]<typename Op>(Op) { add_kernels<Op>(library, layer); });
}

}  // namespace

at::Tensor autograd::as_if_reduced(const Given& g, const at::Tensor& result) {
  if (g.collective == Collective::allreduce) {
    return RecordedElsewhere<Formula<operators::Allreduce>>::apply(
        g.input, &result, g.reduce_op, g.group_name, g.algorithm, g.max_blocks);
  }
  return RecordedElsewhere<Formula<operators::Reducescatter>>::apply(
      g.input, &result, g.reduce_op, g.group_size, g.group_name, g.axis, g.algorithm, g.max_blocks);
}

TORCH_LIBRARY_IMPL(collx, Autograd, library) { add_all_kernels(library, Layer::autograd); }
TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) { add_all_kernels(library, Layer::versions); }

}  // namespace collx
