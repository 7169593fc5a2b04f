// The process group as the fallback uses it: with waits that are bounded here.
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

/// Gathers with a time limit of our own: what a backend does on its own time-out differs (NCCL's
/// wait does not even block the host).
class BoundedGather {
 public:
  BoundedGather(Communicator& communicator, const char* op, const CallDescriptor& descriptor);
  ~BoundedGather();
  BoundedGather(const BoundedGather&) = delete;
  BoundedGather& operator=(const BoundedGather&) = delete;

  /// Whether gathered bytes arrive in CPU memory.
  bool through_cpu() const { return through_cpu_; }

  /// uint8 [n], on the device or in CPU memory as through_cpu() says -> uint8 [world * n].
  at::Tensor operator()(at::Tensor bytes);

  /// In checked mode without regions, where kernels cannot do it: compares the ranks' descriptors.
  void compare_descriptors();

 private:
  using Clock = std::chrono::steady_clock;
  bool serves(c10::DeviceType device) const;
  static bool completes(c10d::Work& work, Clock::time_point deadline);
  /// Ends the communicator: at the deadline by raising CollectiveTimeout. Before it something else
  /// has happened, which is the caller's to pass on, with what this returns: in which call it was.
  std::string give_up(Clock::time_point deadline, const std::string& cause);

  Communicator& communicator_;
  const char* op_;
  const CallDescriptor& descriptor_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::chrono::milliseconds timeout_;
  bool through_cpu_;
};

}  // namespace collx
