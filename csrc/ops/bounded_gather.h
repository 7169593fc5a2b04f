// Wraps the process group for the fallback and bounds its waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <string>

#include "communicator.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace collx {

/// Gathers with its own time limit, because backends behave differently on a timeout (NCCL's wait
/// does not even block the host).
class BoundedGather {
 public:
  BoundedGather(Communicator& communicator, const char* op, const CallDescriptor& descriptor);
  ~BoundedGather();
  BoundedGather(const BoundedGather&) = delete;
  BoundedGather& operator=(const BoundedGather&) = delete;

  /// Whether gathered bytes arrive in CPU memory.
  bool through_cpu() const { return through_cpu_; }

  /// Takes uint8 [n] and returns uint8 [world * n].
  at::Tensor operator()(at::Tensor bytes);

 private:
  void compare_descriptors();
  using Clock = std::chrono::steady_clock;
  bool serves(c10::DeviceType device) const;
  static bool completes(c10d::Work& work, Clock::time_point deadline);
  /// Makes the communicator fail. After the deadline it raises CollectiveTimeout. Before the
  /// deadline the process group has raised an error; then this returns a description of the call,
  /// which the caller adds to that error.
  std::string give_up(Clock::time_point deadline, const std::string& cause);

  Communicator& communicator_;
  const char* op_;
  const CallDescriptor& descriptor_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::chrono::milliseconds timeout_;
  bool through_cpu_;
};

}  // namespace collx
