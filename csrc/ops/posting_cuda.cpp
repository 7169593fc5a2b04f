// Posted calls on CUDA: a stream for each communicator that posts, between two events for each
// call.
#if COLLX_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "communicator.h"
#include "enqueue.h"
#include "errors.h"
#include "posting.h"

namespace collx {

namespace {

using at::cuda::CUDAEvent;
using c10::cuda::CUDAStream;

class CudaPostedCall final : public PostedCall {
 public:
  CudaPostedCall(std::shared_ptr<Communicator> communicator, std::unique_ptr<CallRequest> request,
                 CUDAStream posted_on)
      : communicator_(std::move(communicator)),
        request_(std::move(request)),
        posted_on_(posted_on),
        captured_(capturing(posted_on.stream())) {}

  /// In a capture every stream has to be joined before its end.
  ~CudaPostedCall() override {
    if (!captured_ || waited_) return;
    try {
      if (capturing(posted_on_.stream())) completed_.block(posted_on_);
    } catch (const c10::Error&) {  // the capture has failed, and says so
    }
  }

  void enqueue_on(CUDAStream stream) {
    CUDAEvent before;
    before.record(posted_on_);
    before.block(stream);
    enqueue(*communicator_, *request_, stream);
    completed_.record(stream);
    stream_ = stream;
  }
  bool captured() const { return captured_; }

  bool is_completed() override { return !captured_ && completed_.query(); }

  void wait(Timeout timeout, const std::vector<at::Tensor>& tensors) override {
    communicator_->check_posted(request_->op());
    if (timeout) wait_on_host(*timeout);
    const CUDAStream current = c10::cuda::getCurrentCUDAStream(posted_on_.device_index());
    completed_.block(current);
    waited_ = true;
    if (current == posted_on_ || captured_) return;
    for (const at::Tensor& tensor : tensors) {
      if (tensor.is_cuda()) {
        c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), current);
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
  CUDAEvent completed_;
  bool waited_ = false;
};

class CudaPoster final : public Poster {
 public:
  explicit CudaPoster(c10::Device device)
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())) {}
  ~CudaPoster() override { close(); }

  std::shared_ptr<PostedCall> post(Communicator& communicator,
                                   std::unique_ptr<CallRequest> request) override {
    const c10::cuda::CUDAGuard guard(stream_.device_index());
    auto call =
        std::make_shared<CudaPostedCall>(communicator.shared_from_this(), std::move(request),
                                         c10::cuda::getCurrentCUDAStream(stream_.device_index()));
    call->enqueue_on(stream_);
    std::deque<std::shared_ptr<CudaPostedCall>> completed;
    if (!call->captured()) {
      const std::lock_guard held(mutex_);
      take_completed(completed);
      calls_.push_back(call);
    }
    return call;
  }

  void let_pass() override {}  // StreamOrder orders the calls

  void close() override {
    std::deque<std::shared_ptr<CudaPostedCall>> completed;
    const std::lock_guard held(mutex_);
    take_completed(completed);
    // The device may still use the tensors of the others. They stay.
    static auto* const kept = new std::deque<std::shared_ptr<CudaPostedCall>>;
    static auto* const kept_mutex = new std::mutex;
    const std::lock_guard held_kept(*kept_mutex);
    kept->insert(kept->end(), calls_.begin(), calls_.end());
    calls_.clear();
    while (!kept->empty() && kept->front()->is_completed()) kept->pop_front();
  }

 private:
  /// A handle that was dropped leaves the tensors to the call until it has completed.
  void take_completed(std::deque<std::shared_ptr<CudaPostedCall>>& completed) {
    while (!calls_.empty() && calls_.front()->is_completed()) {
      completed.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
  }

  const CUDAStream stream_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<CudaPostedCall>> calls_;
};

}  // namespace

std::unique_ptr<Poster> make_cuda_poster(c10::Device device) {
  return std::make_unique<CudaPoster>(device);
}

}  // namespace collx
#endif
