// Profiler ranges of a call.
#pragma once

#include <ATen/record_function.h>

#include <memory>

#include "../protocol/call.h"

namespace collx {

class CallRequest;
class Communicator;

/// A profiler range around the host's part of a call. Without an active profiler on this thread it
/// costs the check of a flag. The range has the fields that PyTorch records for a collective
/// ("record_param_comms"). It is nested in a range whose name contains operator, algorithm, bytes
/// and ranks.
class ProfiledCall {
 public:
  ProfiledCall(const Communicator& communicator, const CallRequest& request, const Call& call) {
    if (at::hasCallbacks()) [[unlikely]]
      begin(communicator, request, call);
  }
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

 private:
  void begin(const Communicator& communicator, const CallRequest& request, const Call& call);

  std::shared_ptr<void> ranges_;
};

}  // namespace collx
