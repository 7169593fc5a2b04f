// How the copies of a call lie on streams beside other work.
#pragma once

#include "device.h"

struct CUevent_st;

namespace collx::cuda {

/// Of one communicator. The caller holds the communicator's lock, and its device is the current
/// one. In a capture all of it belongs to the same graph.
class CopyStreams {
 public:
  CopyStreams() = default;
  ~CopyStreams();
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  /// The event for the launch of the barrier before the copies: it is recorded when the barrier has
  /// begun.
  CUevent_st* entering();
  /// Holds another stream until the barrier of the last call has begun, unless one has been held
  /// for it. Without this, a kernel on that stream that fills the device, such as a matrix product,
  /// would keep the barrier waiting until it ends, and the copies would not run beside it.
  void hold(Stream other);

  /// A second stream, for what stays on this device. It begins after what is on `stream` now.
  Stream fork(Stream stream);
  /// What follows on `stream` comes after the second one.
  void join(Stream stream);

 private:
  bool entering_ = false;
  CUevent_st* entered_ = nullptr;
  Stream second_ = nullptr;
  CUevent_st* forked_ = nullptr;
  CUevent_st* joined_ = nullptr;
};

}  // namespace collx::cuda
