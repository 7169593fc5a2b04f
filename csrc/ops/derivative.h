// Nodes of the autograd graph for calls of operators.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include <string>
#include <vector>

#include "operator_table.h"
#include "torch_version.h"

namespace collx {

using torch::autograd::variable_list;

/// Whether the backward is certain to run on every rank, so that it may call a collective. If a
/// rank can leave its result unused, the other ranks would wait for its backward.
constexpr bool has_adjoint(Collective c) { return has_tensors(c) && !has_root(c) && !is_norm(c); }

/// The backward of one call: the collective that is the adjoint of the call's, or the derivative of
/// an epilogue. A node of a collective without an adjoint raises NotImplementedError.
///
/// It is a Node, not a torch::autograd::Function, because torch.func only supports the former.
class Derivative final : public torch::autograd::Node {
 public:
  /// `op` is the functional form. `arguments` are those of the call; tensors are not kept.
  Derivative(const Operator& op, const Arguments& arguments);

  /// `result` becomes the result of this node. `extent`: the input's size along the axis that is
  /// divided. `saved`: the tensors that the backward needs.
  void attach(const at::Tensor& result, const c10::SymInt& extent, const variable_list& saved);
  /// The same for a tensor that was written in place.
  void attach_in_place(const at::Tensor& written);

  std::string name() const override;
  void release_variables() override;
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::autograd::SwapSavedVariables& saved) override;

 private:
  variable_list apply(variable_list&& gradients) override;

  const Operator& op_;
  torch::jit::Stack values_;  // the arguments without tensors, followed by the extent
  std::vector<torch::autograd::SavedVariable> saved_;
  torch::autograd::VariableInfo result_;  // to create zeros for an undefined gradient
};

}  // namespace collx
