// Streams for copies of the host that run side by side, each on a copy engine of its own.
#pragma once

#include <array>

#include "device.h"

struct CUevent_st;

namespace collx::cuda {

/// Of one communicator. A call forks its stream, copies on the branches, and joins them. Whoever
/// calls holds the communicator's lock, and has made its device the current one.
class CopyStreams {
 public:
  /// As many as there are messages to other GPUs, and the one that stays.
  static constexpr int kMost = kMaxCudaRanks;

  CopyStreams() = default;
  ~CopyStreams();
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  /// The event for the launch of the barrier before the copies: it is recorded when the barrier has
  /// begun.
  CUevent_st* entering();
  /// Holds another stream until the barrier of the last call has begun, unless one has been held
  /// for it. Without this, a kernel on that stream that fills the device, such as a matrix product,
  /// would keep the barrier out until it ends, and the copies would not run beside it.
  void hold(Stream other);

  /// The first branch is `stream` itself. The others begin behind what is on it now. In a capture
  /// all of them belong to the same graph.
  void fork(Stream stream, int branches);
  Stream branch(int index) const { return index == 0 ? stream_ : branches_[index - 1].stream; }
  /// What follows on the stream of the fork comes after all branches.
  void join();

 private:
  struct Branch {
    Stream stream = nullptr;
    CUevent_st* done = nullptr;
  };

  Stream stream_ = nullptr;
  int used_ = 0;  // of branches_
  bool entering_ = false;
  CUevent_st* entered_ = nullptr;
  CUevent_st* forked_ = nullptr;
  std::array<Branch, kMost - 1> branches_;
};

}  // namespace collx::cuda
