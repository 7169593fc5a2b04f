// Orders the CUDA streams that use one communicator, because its epochs and slots allow only one
// call at a time.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "../cuda/device.h"

struct CUevent_st;

namespace collx {

/// When the stream changes, an event is recorded on the previous stream, and the new stream waits
/// for it. Calls of one CUDA graph capture are only ordered among themselves: a graph runs when it
/// is replayed, and a capture cannot wait for an event from outside. The busy marks of tiles detect
/// a replay on a stream that is not ordered.
///
/// LIFETIME  A stream that PyTorch does not own must live until the communicator's next call on a
/// different stream, or until the communicator is destroyed.
class StreamOrder {
 public:
  StreamOrder() = default;
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  /// Orders the stream after the communicator's previous call, and returns it. The device must be
  /// the current one. Raises RuntimeError if no event can order them.
  cuda::Stream enter(cuda::Stream stream);

  /// Whether a call has been captured. Any thread may call this.
  bool has_captured() const { return has_captured_.load(std::memory_order_relaxed); }

 private:
  struct Capture {
    unsigned long long id;
    cuda::Stream last;
  };

  void enter_eager(cuda::Stream stream);
  void enter_capture(unsigned long long id, cuda::Stream stream);
  void order(cuda::Stream before, cuda::Stream after, CUevent_st*& event);

  bool used_ = false;
  cuda::Stream last_ = nullptr;
  CUevent_st* eager_event_ = nullptr;
  CUevent_st* capture_event_ = nullptr;
  std::vector<Capture> captures_;  // newest last
  std::atomic<bool> has_captured_{false};
};

/// Whether a stream, or the device's current stream, is being captured into a CUDA graph.
bool capturing(cuda::Stream stream);
bool capturing(c10::Device device);

}  // namespace collx
