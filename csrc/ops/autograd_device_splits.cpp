// Autograd of alltoallv.device_splits, whose second result has no gradient, but is what the
// backward sends by.
#include <torch/library.h>

#include <tuple>

#include "autograd_kernels.h"

namespace collx {

namespace {

using autograd::AutogradContext;
using autograd::Variable;
using autograd::variable_list;

constexpr const char* kGradientOp = "alltoallv";
constexpr const char* kReverse = " (reverse mode works)";

using Results = std::tuple<at::Tensor, at::Tensor>;
using Functional = Results(const at::Tensor&, const at::Tensor&, c10::SymInt, std::string_view,
                           std::string_view, int64_t);
using Out = void(const at::Tensor&, const at::Tensor&, c10::SymInt, std::string_view,
                 std::string_view, int64_t, at::Tensor&, at::Tensor&);

const auto& functional_op() {
  static const auto op = autograd::find_op<Functional>(kGradientOp, "device_splits");
  return op;
}
const auto& out_op() {
  static const auto op = autograd::find_op<Out>(kGradientOp, "device_splits_out");
  return op;
}

struct AlltoallvDeviceSplits : torch::autograd::Function<AlltoallvDeviceSplits> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const at::Tensor& input_splits, const c10::SymInt& capacity,
                               std::string_view group_name, std::string_view algorithm,
                               int64_t max_blocks, c10::DispatchKeySet keys) {
    auto [out, output_splits] = autograd::redispatch_below(
        functional_op(), keys, input, input_splits, capacity, group_name, algorithm, max_blocks);
    context->saved_data["rows"] = input.sym_size(0);
    context->saved_data["group_name"] = autograd::pack(group_name);
    context->saved_data["algorithm"] = autograd::pack(algorithm);
    context->saved_data["max_blocks"] = max_blocks;
    context->save_for_backward({output_splits});
    // The splits are integers, and so without gradient: that need not be marked, which compiled
    // autograd would not take.
    return {out, output_splits};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto& saved = context->saved_data;
    // What was received goes back to where it came from; rows that were not sent get zeros.
    const auto [gradient, input_splits] =
        functional_op().call(gradients.at(0), context->get_saved_variables().at(0),
                             saved.at("rows").toSymInt(), saved.at("group_name").toStringRef(),
                             autograd::for_gradient(saved.at("algorithm").toStringRef()),
                             saved.at("max_blocks").toInt());
    return {gradient, Variable(), Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

Results alltoallv_device_splits(c10::DispatchKeySet keys, const at::Tensor& input,
                                const at::Tensor& input_splits, c10::SymInt capacity,
                                std::string_view group_name, std::string_view algorithm,
                                int64_t max_blocks) {
  autograd::refuse_forward_mode(kGradientOp, kReverse, "input", input);
  if (!autograd::wants_gradient(input)) {
    return autograd::redispatch_below(functional_op(), keys, input, input_splits,
                                      std::move(capacity), group_name, algorithm, max_blocks);
  }
  autograd::refuse_transforms(kGradientOp);
  const variable_list results = AlltoallvDeviceSplits::apply(
      input, input_splits, capacity, group_name, algorithm, max_blocks, keys);
  return {results.at(0), results.at(1)};
}

/// The kernel below autograd, which is the first one in inference mode.
void write_device_splits_out(c10::DispatchKeySet keys, const at::Tensor& input,
                             const at::Tensor& input_splits, c10::SymInt capacity,
                             std::string_view group_name, std::string_view algorithm,
                             int64_t max_blocks, at::Tensor& out, at::Tensor& output_splits) {
  autograd::check_versioned(kGradientOp, "out", out);
  autograd::check_versioned(kGradientOp, "output_splits", output_splits);
  autograd::redispatch_below(out_op(), keys, input, input_splits, std::move(capacity), group_name,
                             algorithm, max_blocks, out, output_splits);
  torch::autograd::increment_version(out);
  torch::autograd::increment_version(output_splits);
}

void alltoallv_device_splits_out(c10::DispatchKeySet keys, const at::Tensor& input,
                                 const at::Tensor& input_splits, c10::SymInt capacity,
                                 std::string_view group_name, std::string_view algorithm,
                                 int64_t max_blocks, at::Tensor& out, at::Tensor& output_splits) {
  autograd::refuse_forward_mode(kGradientOp, kReverse, "input", input);
  autograd::refuse_forward_mode(kGradientOp, kReverse, "out", out);
  autograd::refuse_gradient_of_out(kGradientOp, input, out);
  write_device_splits_out(keys, input, input_splits, std::move(capacity), group_name, algorithm,
                          max_blocks, out, output_splits);
}

}  // namespace

TORCH_LIBRARY_IMPL(collx, Autograd, library) {
  library.impl("alltoallv.device_splits", TORCH_FN(alltoallv_device_splits));
  library.impl("alltoallv.device_splits_out", TORCH_FN(alltoallv_device_splits_out));
}

TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) {
  library.impl("alltoallv.device_splits_out", TORCH_FN(write_device_splits_out));
}

}  // namespace collx
