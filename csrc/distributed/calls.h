// Implements the collectives of torch.distributed as calls of collx's operators.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "../ops/posting.h"
#include "operators.h"

namespace collx::distributed {

/// The tensor that collx reduces instead of a tensor of torch.distributed.
struct Reduction {
  at::Tensor tensor;  // the same memory
  std::string_view op;
};

/// Returns nullopt if collx has no kernel. All ranks make the same decision, from the operation and
/// the dtype.
std::optional<Reduction> reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor);

/// A contiguous tensor as one axis. Raises ValueError, which names the collective and the argument,
/// if the tensor is not contiguous.
at::Tensor flat(const char* op, const char* argument, const at::Tensor& tensor);

/// Makes calls on one communicator, posted or synchronous.
class Calls {
 public:
  Calls(const std::string& communicator, int world, int rank, bool posts)
      : name(communicator), world(world), rank(rank), posts_(posts) {}

  const std::string& name;
  const int world, rank;

  /// `then` runs after the call, on its stream.
  template <typename F>
  void operator()(F call, const std::function<void()>& then = {}) {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!posts_) {
      call();
      if (then) then();
      return;
    }
    Posting posting(then);
    call();
    if (posting.posted() != nullptr) {
      posted_.push_back(posting.posted());
    } else if (then) {
      then();
    }
  }

  /// Keeps the tensors of the calls alive until a caller has waited for the calls.
  void uses(const at::Tensor& tensor) { tensors_.push_back(tensor); }
  void uses(const std::vector<at::Tensor>& tensors) {
    tensors_.insert(tensors_.end(), tensors.begin(), tensors.end());
  }

  const std::vector<std::shared_ptr<PostedCall>>& posted() const { return posted_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  void allgather(const at::Tensor& input, const at::Tensor& output);
  void allgather(const at::Tensor& input, const std::vector<at::Tensor>& outputs);
  /// `to`: the tensor that replaces the output.
  void reducescatter(const at::Tensor& input, const Reduction& to, const c10d::ReduceOp& op);
  void reducescatter(const std::vector<at::Tensor>& inputs, const at::Tensor& output,
                     const Reduction& to, const c10d::ReduceOp& op);
  void alltoall(const at::Tensor& input, const at::Tensor& output,
                std::vector<int64_t> input_splits, std::vector<int64_t> output_splits);
  void alltoall(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);
  /// `outputs` is empty except on root.
  void gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int64_t root);
  void gather(const at::Tensor& input, const at::Tensor& output, int64_t root);
  /// `inputs` is empty except on root.
  void scatter(const std::vector<at::Tensor>& inputs, const at::Tensor& output, int64_t root);

 private:
  /// One flat tensor that a call writes instead of several tensors, and the function that then
  /// copies the values to those tensors.
  struct Target {
    at::Tensor flat;
    std::function<void()> then;
  };
  static Target target_of(const std::vector<at::Tensor>& outputs);

  const bool posts_;
  std::vector<std::shared_ptr<PostedCall>> posted_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace collx::distributed
