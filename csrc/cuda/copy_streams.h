// The streams of a call's copies, beside other work.
#pragma once

#include "device.h"

struct CUevent_st;

namespace collx::cuda {

/// One object for each communicator. The caller holds the communicator's lock, and its device is
/// current. Captures of one communicator follow each other; eager calls may be beside them.
class CopyStreams {
 public:
  CopyStreams() = default;
  ~CopyStreams();
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  /// The event for the launch of the barrier before the copies. It is recorded when the barrier has
  /// begun.
  CUevent_st* entered();
  /// Makes another stream wait until the barrier of the last call has begun. Otherwise a kernel on
  /// that stream that fills the device, such as a matrix product, would delay the barrier until it
  /// ends, and the copies would not overlap with it.
  void hold(Stream other);

  /// A second stream, for the part that stays on this device. It starts after the work that is on
  /// `stream` now.
  Stream fork(Stream stream);
  /// Orders later work on `stream` after the work of the second stream.
  void join(Stream stream);

 private:
  Stream second(Stream stream);

  CUevent_st* entered_ = nullptr;
  // A stream belongs to a capture until that ends, and an eager call on it would end the capture.
  Stream eager_ = nullptr;
  Stream captured_ = nullptr;
  CUevent_st* forked_ = nullptr;
  CUevent_st* joined_ = nullptr;
};

}  // namespace collx::cuda
