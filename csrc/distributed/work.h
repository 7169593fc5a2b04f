// What the backend returns for a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../ops/posting.h"
#include "../ops/torch_version.h"
#include "ending.h"

namespace collx::distributed {

/// Calls of one communicator that belong together, and calls of the inner group. Without any of
/// them it stands for a synchronous call, which is ordered on the current stream already.
class Work final : public c10d::Work {
 public:
  struct Made {
    std::vector<std::shared_ptr<PostedCall>> calls;
    std::vector<c10::intrusive_ptr<c10d::Work>> inner;
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> tensors;  // all that the calls use
    /// Of a barrier: seconds for which wait() blocks the host at most.
    PostedCall::Timeout host_waits;
    std::shared_ptr<Ending> ending;  // null without hooks
  };

  /// With a title, an event of the profiler begins, and ends when the calls have completed; on CUDA
  /// when they have been enqueued.
  Work(int rank, c10d::OpType type, uint64_t number, const char* title = nullptr,
       const std::optional<std::vector<at::Tensor>>& inputs = std::nullopt);
  /// Once, before anybody else has the work.
  void set(Made made);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;
#if COLLX_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override;
#endif

 private:
  const uint64_t number_;
  Made made_;
};

}  // namespace collx::distributed
