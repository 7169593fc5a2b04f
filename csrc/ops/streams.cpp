#if COLLX_CUDA
#include "streams.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>

namespace collx {

namespace {

constexpr size_t kCapturesKept = 8;  // more captures than this do not run at the same time

cudaStreamCaptureStatus capture_status(cuda::Stream stream, unsigned long long* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, id));
  return status;
}

/// Also true if the runtime returns an error, as it does for the legacy stream during a capture.
bool is_captured(cuda::Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  (void)cudaGetLastError();
  return true;
}

}  // namespace

StreamOrder::~StreamOrder() {
  // These calls do not wait. They may fail at the interpreter's exit or in a forked child.
  if (eager_event_ != nullptr) (void)cudaEventDestroy(eager_event_);
  if (capture_event_ != nullptr) (void)cudaEventDestroy(capture_event_);
}

cuda::Stream StreamOrder::enter(cuda::Stream stream) {
  unsigned long long id = 0;
  if (capture_status(stream, &id) == cudaStreamCaptureStatusNone) {
    enter_eager(stream);
  } else {
    enter_capture(id, stream);
  }
  return stream;
}

void StreamOrder::enter_eager(cuda::Stream stream) {
  if (used_ && stream != last_) {
    TORCH_CHECK(!is_captured(last_),
                "collx: the communicator's previous eager call ran on a stream that is being "
                "captured now, so a call on another stream cannot be ordered after it; make it "
                "before or after the capture, or on a communicator of its own");
    order(last_, stream, eager_event_);
  }
  used_ = true;
  last_ = stream;
}

void StreamOrder::enter_capture(unsigned long long id, cuda::Stream stream) {
  const auto found = std::find_if(captures_.begin(), captures_.end(),
                                  [id](const Capture& capture) { return capture.id == id; });
  if (found != captures_.end()) {
    if (found->last != stream) order(found->last, stream, capture_event_);
    found->last = stream;
    return;
  }
  if (captures_.size() == kCapturesKept) captures_.erase(captures_.begin());
  captures_.push_back({id, stream});
  has_captured_.store(true, std::memory_order_relaxed);
}

void StreamOrder::order(cuda::Stream before, cuda::Stream after, CUevent_st*& event) {
  if (event == nullptr) {
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  C10_CUDA_CHECK(cudaEventRecord(event, before));
  C10_CUDA_CHECK(cudaStreamWaitEvent(after, event, 0));
}

bool capturing(cuda::Stream stream) {
  return capture_status(stream, nullptr) != cudaStreamCaptureStatusNone;
}
bool capturing(c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);  // otherwise the current device would get a context
  return capturing(c10::cuda::getCurrentCUDAStream(device.index()).stream());
}

}  // namespace collx
#endif
