// Order between the CUDA streams that use one communicator, whose epochs and slots allow one call
// at a time.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "../cuda/device.h"

struct CUevent_st;

namespace collx {

/// At a change of stream an event is recorded on the previous stream and awaited on the new one.
/// Calls of one CUDA graph capture are compared among themselves only: a graph runs when it is
/// replayed, and an event from outside of a capture cannot be awaited in it. A replay on a stream
/// without an order is detected by the tiles' busy marks.
///
/// LIFETIME  A stream of which PyTorch is not the owner has to live until the communicator's next
/// call on another stream, or until the communicator's end.
class StreamOrder {
 public:
  StreamOrder() = default;
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  /// Orders the stream after the communicator's previous call, and returns it. The device has to be
  /// the current one. RuntimeError when no event can order them.
  cuda::Stream enter(cuda::Stream stream);

  /// Whether a call has been captured. By any thread.
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
