// Posted calls on the CPU. Each communicator that posts has a thread.
#include <ATen/ThreadLocalState.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <condition_variable>
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

using Clock = std::chrono::steady_clock;

/// How long a waiting thread spins before it sleeps, since waking a thread takes longer than a
/// small call.
constexpr std::chrono::microseconds kLooks{20};
/// How long the poster's thread leaves a new call to the thread that posted it. If that thread
/// waits immediately, it runs the call itself, which saves two handoffs between threads.
constexpr std::chrono::microseconds kHeadStart{5};

template <typename F>
bool soon(std::chrono::nanoseconds limit, F holds) {
  for (const auto until = Clock::now() + limit; Clock::now() < until;) {
    if (holds()) return true;
    std::this_thread::yield();
  }
  return holds();
}

class CpuPostedCall;

/// The posted calls of one communicator. One thread at a time runs them, in order: the poster's
/// thread, or a thread that waits for one of them.
class Queue {
 public:
  void add(std::shared_ptr<CpuPostedCall> call, Communicator& communicator);
  /// Runs calls of the queue until `call` has completed or another thread runs a call.
  void run_until(const CpuPostedCall& call);
  void wait_until_empty();
  /// Runs calls until the queue is closed and empty.
  void work();
  void close();

 private:
  using Calls = std::deque<std::shared_ptr<CpuPostedCall>>;

  bool is_empty() const {
    return completed_.load(std::memory_order_acquire) == posted_.load(std::memory_order_acquire);
  }
  bool may_run() const { return !running_ && !is_empty(); }
  void run_next(std::unique_lock<std::mutex>& held);

  /// Moves completed calls out of the queue. Releasing their tensors may require Python's lock, for
  /// which the poster's thread must not wait. So the threads that post and wait destroy the calls,
  /// after they have released this lock.
  void take_completed(Calls& completed) {
    for (; first_ < completed_.load(std::memory_order_relaxed); ++first_) {
      completed.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Calls calls_;  // the first has number first_
  uint64_t first_ = 0;
  std::atomic<uint64_t> posted_{0}, completed_{0};
  std::atomic<bool> running_{false};  // written with the mutex
  bool closed_ = false;
};

class CpuPostedCall final : public PostedCall {
 public:
  CpuPostedCall(std::shared_ptr<Communicator> communicator, std::unique_ptr<CallRequest> request,
                std::shared_ptr<Queue> queue)
      : communicator_(std::move(communicator)),
        request_(std::move(request)),
        queue_(std::move(queue)) {}

  /// Must not throw: the queue would remain blocked.
  void run() noexcept {
    try {
      const CarryErrors for_those_who_wait;
      if (std::this_thread::get_id() == thread_) {
        const c10::InferenceMode mode(inference_mode_);
        const c10::impl::ForceDispatchKeyGuard keys(keys_);
        enqueue_as_posted();
      } else {
        const at::ThreadLocalStateGuard state(state_);
        enqueue_as_posted();
      }
    } catch (...) {
      error_ = std::current_exception();
    }
    std::vector<Done> waiting;
    {
      const std::lock_guard held(mutex_);
      completed_.store(true, std::memory_order_release);
      waiting.swap(waiting_);
    }
    changed_.notify_all();
    for (const Done& done : waiting) done(error_);
  }

  const char* op() const { return request_->op(); }

  bool is_completed() override { return is_done(); }
  bool is_done() const { return completed_.load(std::memory_order_acquire); }

  void wait(Timeout timeout, const std::vector<at::Tensor>& /*tensors*/) override {
    const auto done = [this] { return is_done(); };
    if (!done()) {
      // A forked child has no thread that could complete the call.
      if (communicator_->forked()) communicator_->require_usable(request_->op());
      // Only the timeout of the communicator bounds a call that this thread runs.
      if (!timeout || *timeout >= communicator_->timeout()) queue_->run_until(*this);
    }
    if (!soon(kLooks, done)) {
      std::unique_lock held(mutex_);
      if (!timeout) {
        changed_.wait(held, done);
      } else if (!changed_.wait_for(held, *timeout, done)) {
        held.unlock();
        raise_not_completed(*communicator_, request_->op(), *timeout);
      }
    }
    if (error_) raise_carried(error_);
  }

  void when_completed(Done done) override {
    {
      const std::lock_guard held(mutex_);
      if (!is_done()) {
        waiting_.push_back(std::move(done));
        return;
      }
    }
    done(error_);
  }

 private:
  void enqueue_as_posted() {
    communicator_->require_usable(request_->op());
    enqueue(*communicator_, *request_, current_stream(communicator_->options().device));
  }

  const std::shared_ptr<Communicator> communicator_;
  const std::unique_ptr<CallRequest> request_;
  const std::shared_ptr<Queue> queue_;
  // The state of the thread that posts. On that thread, only the parts on which PyTorch's operators
  // depend are restored: to restore all of it takes longer than a small call.
  const at::ThreadLocalState state_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
  const bool inference_mode_ = c10::InferenceMode::is_enabled();
  std::exception_ptr error_;  // only the thread that runs the call accesses it until completed_
  std::atomic<bool> completed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Done> waiting_;
};

void Queue::add(std::shared_ptr<CpuPostedCall> call, Communicator& communicator) {
  Calls completed;
  {
    const std::lock_guard held(mutex_);
    if (closed_) communicator.refuse_if_destroyed(call->op());  // by another thread
    take_completed(completed);
    calls_.push_back(std::move(call));
    posted_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_all();
}

void Queue::run_next(std::unique_lock<std::mutex>& held) {
  running_ = true;
  std::shared_ptr<CpuPostedCall> call = calls_[completed_.load(std::memory_order_relaxed) - first_];
  held.unlock();
  call->run();
  call.reset();  // not the last reference
  held.lock();
  running_ = false;
  completed_.fetch_add(1, std::memory_order_release);
  changed_.notify_all();
}

void Queue::run_until(const CpuPostedCall& call) {
  std::unique_lock held(mutex_);
  while (!call.is_done() && may_run()) run_next(held);
}

void Queue::wait_until_empty() {
  Calls completed;
  std::unique_lock held(mutex_);
  changed_.wait(held, [this] { return is_empty(); });
  take_completed(completed);
  held.unlock();
}

void Queue::work() {
  std::unique_lock held(mutex_);
  for (;;) {
    if (is_empty()) {
      const uint64_t seen = posted_.load(std::memory_order_relaxed);
      const auto posted = [&] { return posted_.load(std::memory_order_acquire) != seen; };
      held.unlock();
      const bool more = soon(kLooks, posted);
      if (more) {
        soon(kHeadStart, [this] { return running_ || is_empty(); });
        soon(kLooks, [this] { return !running_; });
      }
      held.lock();
      if (more && is_empty()) continue;
    }
    changed_.wait(held, [this] { return may_run() || (closed_ && is_empty()); });
    if (is_empty()) return;
    run_next(held);
  }
}

void Queue::close() {
  const std::lock_guard held(mutex_);
  closed_ = true;
  changed_.notify_all();
}

class CpuPoster final : public Poster {
 public:
  CpuPoster() : thread_([queue = queue_] { queue->work(); }) {}
  ~CpuPoster() override { close(); }

  std::shared_ptr<PostedCall> post(Communicator& communicator,
                                   std::unique_ptr<CallRequest> request) override {
    auto call = std::make_shared<CpuPostedCall>(communicator.shared_from_this(), std::move(request),
                                                queue_);
    queue_->add(call, communicator);
    return call;
  }

  void let_pass() override { queue_->wait_until_empty(); }

  void close() override {
    if (!thread_.joinable()) return;
    queue_->close();
    thread_.join();
    queue_->wait_until_empty();
  }

 private:
  const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Poster> make_cpu_poster() { return std::make_unique<CpuPoster>(); }

}  // namespace collx
