// Posted calls on CUDA. Each communicator that posts has a stream for eager calls and one for calls
// in a capture. Each call has an event, which is recorded twice: it orders the call after the
// stream of the post, and then marks its completion.
#if COLLX_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "call.h"
#include "communicator.h"
#include "enqueue.h"
#include "errors.h"
#include "posting.h"
#include "symmetric_pool.h"

namespace collx {

namespace {

using c10::cuda::CUDAStream;

/// Reuses events of one device, without timing, because creating an event takes longer than
/// recording it.
class EventPool {
 public:
  explicit EventPool(c10::Device device) : device_(device) {}
  ~EventPool() {
    end_on(device_, [this] {
      for (const cudaEvent_t event : free_) (void)cudaEventDestroy(event);
    });
  }
  cudaEvent_t take() {
    {
      const std::lock_guard held(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void give_back(cudaEvent_t event) {
    const std::lock_guard held(mutex_);
    free_.push_back(event);
  }

 private:
  const c10::Device device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

/// Returns the error without leaving it for the next call of the runtime.
cudaError_t query(cudaEvent_t event) {
  // In another mode, the query would fail during a capture, and end it.
  auto mode = cudaStreamCaptureModeRelaxed;
  const bool relaxed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
  const cudaError_t found = cudaEventQuery(event);
  if (relaxed) (void)cudaThreadExchangeStreamCaptureMode(&mode);
  if (!relaxed || found != cudaSuccess) (void)cudaGetLastError();
  return found;
}

/// Whether the result of a query means that the work may still run. A query that a capture refuses
/// tells nothing about the work.
bool may_run(cudaError_t found) {
  return found == cudaErrorNotReady || found == cudaErrorStreamCaptureUnsupported;
}

class CudaPostedCall final : public PostedCall {
 public:
  CudaPostedCall(std::shared_ptr<Communicator> communicator, std::unique_ptr<CallRequest> request,
                 CUDAStream posted_on, std::shared_ptr<EventPool> events)
      : communicator_(std::move(communicator)),
        request_(std::move(request)),
        posted_on_(posted_on),
        captured_(capturing(posted_on.stream())),
        events_(std::move(events)),
        completed_(events_->take()) {}

  /// A capture requires that all its streams are joined before it ends.
  ~CudaPostedCall() override {
    if (captured_ && !waited_) {
      end_on(posted_on_.device(), [this] {
        // If the wait fails, the capture has already failed and reports its own error.
        if (capturing(posted_on_.stream())) {
          (void)cudaStreamWaitEvent(posted_on_.stream(), completed_, 0);
        }
      });
    }
    events_->give_back(completed_);
  }

  void enqueue_on(CUDAStream eager, CUDAStream captured) {
    const CUDAStream stream = captured_ ? captured : eager;
    // The event first marks the work before the call.
    C10_CUDA_CHECK(cudaEventRecord(completed_, posted_on_.stream()));
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), completed_, 0));
    enqueue(*communicator_, *request_, stream, posted_on_);
    C10_CUDA_CHECK(cudaEventRecord(completed_, stream.stream()));
    stream_ = stream;
  }

  /// Whether the tensors may be released. The allocator reuses their memory on the stream of the
  /// post, which must then be ordered after the call. In a capture, the destructor orders it.
  bool may_end() const {
    if (captured_ || waited_) return true;
    bool ends = true;  // also after another error
    end_on(posted_on_.device(), [&] { ends = !may_run(query(completed_)); });
    return ends;
  }

  bool is_completed() const override {
    if (captured_) return false;
    const OnDevice guard(posted_on_.device());
    const cudaError_t found = query(completed_);
    if (may_run(found)) return false;
    C10_CUDA_CHECK(found);
    return true;
  }

  void wait(Timeout timeout, const std::vector<at::Tensor>& tensors) override {
    communicator_->check_posted(request_->op());
    if (timeout) wait_on_host(*timeout);
    const OnDevice guard(posted_on_.device());
    const CUDAStream current = c10::cuda::getCurrentCUDAStream(posted_on_.device_index());
    C10_CUDA_CHECK(cudaStreamWaitEvent(current.stream(), completed_, 0));
    // Also during a capture, other streams do not order the stream of the post, on which the memory
    // of the tensors is reused.
    if (current == posted_on_) {
      waited_ = true;
      return;
    }
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.is_cuda()) continue;
      const c10::DataPtr& memory = tensor.storage().data_ptr();
      if (!note_use(memory, current)) {
        c10::cuda::CUDACachingAllocator::recordStream(memory, current);
      }
    }
  }

  void when_completed(Done done) override {
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    done(nullptr);
  }

 private:
  void wait_on_host(std::chrono::nanoseconds timeout) {
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (!is_completed()) {
      communicator_->check_posted(request_->op());
      if (captured_ || std::chrono::steady_clock::now() >= until) {
        raise_not_completed(*communicator_, request_->op(), timeout);
      }
      std::this_thread::yield();
    }
  }

  const std::shared_ptr<Communicator> communicator_;
  const std::unique_ptr<CallRequest> request_;
  const CUDAStream posted_on_;
  const bool captured_;
  std::optional<CUDAStream> stream_;
  const std::shared_ptr<EventPool> events_;
  const cudaEvent_t completed_;
  bool waited_ = false;
};

/// Calls whose handles were dropped before the calls had completed.
class Dropped {
 public:
  void add(std::unique_ptr<CudaPostedCall> call) {
    const std::lock_guard held(mutex_);
    calls_.push_back(std::move(call));
  }
  void take_completed() {
    std::vector<std::unique_ptr<CudaPostedCall>> completed;  // destroyed after the lock is released
    const std::lock_guard held(mutex_);
    size_t in_progress = 0;
    for (auto call = calls_.begin(); call != calls_.end() && in_progress < kLooks;) {
      if ((*call)->is_completed()) {
        completed.push_back(std::move(*call));
        call = calls_.erase(call);
      } else {
        ++in_progress;
        ++call;
      }
    }
  }

 private:
  /// Limits the time of a look. A call of another communicator may be in progress for long.
  static constexpr size_t kLooks = 8;

  std::mutex mutex_;
  std::deque<std::unique_ptr<CudaPostedCall>> calls_;
};

class CudaPoster final : public Poster {
 public:
  explicit CudaPoster(c10::Device device)
      : eager_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())),
        captured_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())) {}

  std::shared_ptr<PostedCall> post(Communicator& communicator,
                                   std::unique_ptr<CallRequest> request) override {
    const c10::cuda::CUDAGuard guard(eager_.device_index());
    dropped().take_completed();
    auto call = std::make_unique<CudaPostedCall>(
        communicator.shared_from_this(), std::move(request),
        c10::cuda::getCurrentCUDAStream(eager_.device_index()), events_);
    call->enqueue_on(eager_, captured_);
    return {call.release(), [](CudaPostedCall* ended) {
              std::unique_ptr<CudaPostedCall> held(ended);
              if (!held->may_end()) dropped().add(std::move(held));
            }};
  }

  bool has_pending() const override { return false; }
  /// StreamOrder orders the calls.
  void let_pass() override { dropped().take_completed(); }
  void close() override {}  // the device may still use the tensors

 private:
  /// Shared by all communicators, so that the tensors outlive a destroyed communicator.
  static Dropped& dropped() {
    static auto* const calls = new Dropped;
    return *calls;
  }

  const CUDAStream eager_;
  // A stream belongs to a capture until that ends, and an eager call on it would end the capture.
  const CUDAStream captured_;
  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(eager_.device());
};

}  // namespace

std::unique_ptr<Poster> make_cuda_poster(c10::Device device) {
  return std::make_unique<CudaPoster>(device);
}

}  // namespace collx
#endif
