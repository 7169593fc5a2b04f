// The work object that the backend returns for a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../ops/posting.h"
#include "../ops/torch_version.h"
#include "ending.h"

namespace collx::distributed {

/// A set of calls on one communicator and of calls on the inner group. Without calls it represents
/// a synchronous call, which is already ordered on the current stream.
class C10_EXPORT Work final : public c10d::Work {
 public:
  struct Made {
    std::vector<std::shared_ptr<PostedCall>> calls;
    std::vector<c10::intrusive_ptr<c10d::Work>> inner;
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> tensors;  // all tensors that the calls use
    /// For a barrier on CUDA: the maximum time for which wait() blocks the host.
    PostedCall::Timeout host_waits;
    std::shared_ptr<Ending> ending;  // null without hooks
  };

  /// With a title, this begins a profiler event, which ends when the calls have completed, or on
  /// CUDA when they have been enqueued.
  Work(int rank, c10d::OpType type, uint64_t number, const char* title = nullptr,
       const std::optional<std::vector<at::Tensor>>& inputs = std::nullopt);
  /// Must be called once, before any other code has access to the work.
  void set(Made made);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  /// On CUDA, the future is complete when the call has been enqueued, so it cannot hold the stream.
  void blockCurrentStream() override { synchronize(); }
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
