// Autograd of the collective operators: one formula each, which calls the operator that is the
// adjoint. What has no formula that every rank's backward would be sure to run refuses by name.
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

#include "autograd_kernels.h"

namespace collx {

namespace {

using autograd::AutogradContext;
using autograd::Differentiable;
using autograd::for_gradient;
using autograd::Kernels;
using autograd::NotDifferentiable;

void refuse_reduce_op(const char* op, std::string_view reduce_op) {
  TORCH_CHECK_NOT_IMPLEMENTED(reduce_op == "sum" || reduce_op == "avg", "collx.", op,
                              ": reduce_op: \"", reduce_op,
                              "\" has no backward; accepted where a gradient is asked for: sum, "
                              "avg (or detach the input)");
}

struct Allreduce : Differentiable {
  static constexpr const char* kName = "allreduce";
  static constexpr const char* kReverse = " (reverse mode works for sum and avg)";
  using Signature = at::Tensor(const at::Tensor&, std::string_view reduce_op,
                               std::string_view group_name, std::string_view algorithm,
                               int64_t max_blocks);
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient,
                             std::string_view reduce_op, std::string_view group_name,
                             std::string_view algorithm, int64_t max_blocks) {
    refuse_reduce_op(kName, reduce_op);
    return Kernels<Allreduce>::functional_op().call(gradient, reduce_op, group_name,
                                                    for_gradient(algorithm), max_blocks);
  }
};

struct Reducescatter : Differentiable {
  static constexpr const char* kName = "reducescatter";
  static constexpr const char* kReverse = " (reverse mode works for sum and avg)";
  using Signature = at::Tensor(const at::Tensor&, std::string_view reduce_op, int64_t group_size,
                               std::string_view group_name, int64_t axis,
                               std::string_view algorithm, int64_t max_blocks);
  static void save(AutogradContext& context, const at::Tensor& input, std::string_view, int64_t,
                   std::string_view, int64_t axis, std::string_view, int64_t) {
    context.saved_data["total"] = input.sym_size(axis);
  }
  static at::Tensor backward(const AutogradContext& context, const at::Tensor& gradient,
                             std::string_view reduce_op, int64_t group_size,
                             std::string_view group_name, int64_t axis, std::string_view algorithm,
                             int64_t max_blocks);
};

struct Allgather : Differentiable {
  static constexpr const char* kName = "allgather";
  using Signature = at::Tensor(const at::Tensor&, int64_t group_size, std::string_view group_name,
                               int64_t axis, std::optional<c10::SymInt> total,
                               std::string_view algorithm, int64_t max_blocks);
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient, int64_t group_size,
                             std::string_view group_name, int64_t axis,
                             const std::optional<c10::SymInt>& /*the gradient's size says it*/,
                             std::string_view algorithm, int64_t max_blocks) {
    const auto sum = [&](const at::Tensor& parts, int64_t along) {
      return Kernels<Reducescatter>::functional_op().call(
          parts, "sum", group_size, group_name, along, for_gradient(algorithm), max_blocks);
    };
    if (!gradient.is_complex()) return sum(gradient, axis);
    // Complex numbers can be gathered but not reduced; their sum is that of the two parts.
    return at::view_as_complex(
        sum(at::view_as_real(gradient.resolve_conj()), axis < 0 ? axis - 1 : axis));
  }
};

at::Tensor Reducescatter::backward(const AutogradContext& context, const at::Tensor& gradient,
                                   std::string_view reduce_op, int64_t group_size,
                                   std::string_view group_name, int64_t axis,
                                   std::string_view algorithm, int64_t max_blocks) {
  refuse_reduce_op(kName, reduce_op);
  std::optional<c10::SymInt> total = context.saved_data.at("total").toSymInt();
  if (*total % group_size == 0) total.reset();
  return Kernels<Allgather>::functional_op().call(
      reduce_op == "avg" ? gradient.div(group_size) : gradient, group_size, group_name, axis,
      std::move(total), for_gradient(algorithm), max_blocks);
}

struct Alltoall : Differentiable {
  static constexpr const char* kName = "alltoall";
  using Signature = at::Tensor(const at::Tensor&, int64_t group_size, std::string_view group_name,
                               std::string_view algorithm, int64_t max_blocks);
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient, int64_t group_size,
                             std::string_view group_name, std::string_view algorithm,
                             int64_t max_blocks) {
    return Kernels<Alltoall>::functional_op().call(gradient, group_size, group_name,
                                                   for_gradient(algorithm), max_blocks);
  }
};

struct Alltoallv : Differentiable {
  static constexpr const char* kName = "alltoallv";
  using Signature = at::Tensor(const at::Tensor&, c10::SymIntArrayRef output_splits,
                               c10::SymIntArrayRef input_splits, std::string_view group_name,
                               std::string_view algorithm, int64_t max_blocks);
  static at::Tensor backward(const AutogradContext&, const at::Tensor& gradient,
                             c10::SymIntArrayRef output_splits, c10::SymIntArrayRef input_splits,
                             std::string_view group_name, std::string_view algorithm,
                             int64_t max_blocks) {
    // What was received goes back to where it came from.
    return Kernels<Alltoallv>::functional_op().call(gradient, /*output_splits=*/input_splits,
                                                    /*input_splits=*/output_splits, group_name,
                                                    for_gradient(algorithm), max_blocks);
  }
};

struct Broadcast : NotDifferentiable<Broadcast> {
  static constexpr const char* kName = "broadcast";
  using Signature = at::Tensor(const at::Tensor&, int64_t root, std::string_view group_name,
                               std::string_view algorithm, int64_t max_blocks);
};

struct Reduce : NotDifferentiable<Reduce> {
  static constexpr const char* kName = "reduce";
  using Signature = at::Tensor(const at::Tensor&, std::string_view reduce_op, int64_t root,
                               std::string_view group_name, std::string_view algorithm,
                               int64_t max_blocks);
};

struct Gather : NotDifferentiable<Gather> {
  static constexpr const char* kName = "gather";
  using Signature = at::Tensor(const at::Tensor&, int64_t root, int64_t group_size,
                               std::string_view group_name, std::string_view algorithm,
                               int64_t max_blocks);
};

struct Scatter : NotDifferentiable<Scatter> {
  static constexpr const char* kName = "scatter";
  using Signature = at::Tensor(const at::Tensor&, int64_t root, int64_t group_size,
                               std::string_view group_name, std::string_view algorithm,
                               int64_t max_blocks);
};

/// What the kernels of an operator are in each of the two libraries below.
enum class Layer : uint8_t { autograd, versions };

template <typename Op>
void add_kernels(torch::Library& library, Layer layer) {
  const std::string name = Op::kName, out = name + ".out";
  if (layer == Layer::versions) {
    library.impl(out.c_str(), TORCH_FN(Kernels<Op>::write_out));
    return;
  }
  library.impl(name.c_str(), TORCH_FN(Kernels<Op>::functional));
  library.impl(out.c_str(), TORCH_FN(Kernels<Op>::out));
}

template <typename Op>
void add_inplace_kernel(torch::Library& library, Layer layer) {
  const std::string name = std::string(Op::kName) + "_";
  if (layer == Layer::versions) {
    library.impl(name.c_str(), TORCH_FN(Kernels<Op>::write_inplace));
  } else {
    library.impl(name.c_str(), TORCH_FN(Kernels<Op>::inplace));
  }
}

void add_all_kernels(torch::Library& library, Layer layer) {
  add_kernels<Allreduce>(library, layer);
  add_kernels<Reducescatter>(library, layer);
  add_kernels<Allgather>(library, layer);
  add_kernels<Broadcast>(library, layer);
  add_kernels<Reduce>(library, layer);
  add_kernels<Gather>(library, layer);
  add_kernels<Scatter>(library, layer);
  add_kernels<Alltoall>(library, layer);
  add_kernels<Alltoallv>(library, layer);
  add_inplace_kernel<Allreduce>(library, layer);
  add_inplace_kernel<Broadcast>(library, layer);
  add_inplace_kernel<Reduce>(library, layer);
  add_inplace_kernel<Alltoall>(library, layer);
}

}  // namespace

TORCH_LIBRARY_IMPL(collx, Autograd, library) { add_all_kernels(library, Layer::autograd); }
TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) { add_all_kernels(library, Layer::versions); }

}  // namespace collx
