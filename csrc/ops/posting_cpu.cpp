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

/// The callbacks of a completed call, with its failure. They do not keep the call, whose tensors
/// could otherwise outlive the waits for it.
struct Callbacks {
  std::vector<PostedCall::Done> functions;
  std::exception_ptr error;

  /// May release tensors and the communicator.
  void run() noexcept {
    for (const PostedCall::Done& done : functions) done(error);
    *this = {};
  }
};

/// The posted calls of one communicator. One thread at a time runs them, in order: the attendant,
/// which is a thread of the queue, or a thread that waits for one of them. Callbacks of a call may
/// wait for later calls. So they run after the call counts as completed, and another thread of the
/// queue is the attendant meanwhile.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  bool is_empty() const {
    return completed_.load(std::memory_order_acquire) == posted_.load(std::memory_order_acquire);
  }
  /// Starts a thread.
  void start();
  void add(std::shared_ptr<CpuPostedCall> call, Communicator& communicator);
  /// Runs calls until `call` has completed or another thread runs a call.
  void run_until(const CpuPostedCall& call);
  /// Runs calls, or waits for the thread that does.
  void run_until_empty();
  /// Lets the threads run the remaining calls and ends them.
  void close();

 private:
  using Calls = std::deque<std::shared_ptr<CpuPostedCall>>;

  bool may_run() const { return !running_ && !is_empty(); }
  void work();
  /// Waits for a call that the attendant may run. False if the queue is closed and empty.
  bool await_call(std::unique_lock<std::mutex>& held);
  /// Returns the callbacks of the call, which the caller must run without the lock.
  Callbacks run_next(std::unique_lock<std::mutex>& held);
  void run_next_and_callbacks(std::unique_lock<std::mutex>& held);

  /// Moves completed calls out of the queue. Releasing their tensors may require Python's lock, for
  /// which the attendant must not wait. So the threads that post and wait destroy the calls, after
  /// they have released this lock.
  void take_completed(Calls& completed) {
    for (; first_ < completed_.load(std::memory_order_relaxed); ++first_) {
      completed.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_, unattended_;
  std::vector<std::thread> threads_;
  int spare_ = 0;          // threads that wait until there is no attendant
  bool attended_ = false;  // whether there is an attendant
  Calls calls_;            // the first has number first_
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
        op_(request->op()),
        request_(std::move(request)),
        queue_(std::move(queue)) {}

  /// Must not throw: the queue would remain blocked. The caller must run the callbacks.
  Callbacks run() noexcept {
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
    Callbacks callbacks{{}, error_};
    {
      const std::lock_guard held(mutex_);
      callbacks.functions = std::move(callbacks_);
      completed_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
    return callbacks;
  }

  const char* op() const { return op_; }

  bool is_completed() const override { return completed_.load(std::memory_order_acquire); }

  void wait(Timeout timeout, const std::vector<at::Tensor>& /*tensors*/) override {
    const auto done = [this] { return is_completed(); };
    if (!done()) {
      // A forked child has no thread that could complete the call.
      if (communicator_->forked()) communicator_->require_usable(op_);
      // `timeout` does not bound calls that this thread runs.
      if (!timeout) queue_->run_until(*this);
    }
    if (!soon(kLooks, done)) {
      std::unique_lock held(mutex_);
      if (!timeout) {
        changed_.wait(held, done);
      } else if (!changed_.wait_for(held, *timeout, done)) {
        held.unlock();
        raise_not_completed(*communicator_, op_, *timeout);
      }
    }
    release_tensors();
    if (error_) raise_carried(error_);
  }

  void when_completed(Done done) override {
    {
      const std::lock_guard held(mutex_);
      if (!is_completed()) {
        callbacks_.push_back(std::move(done));
        return;
      }
    }
    done(error_);
  }

 private:
  /// Only for a thread that waits, since this may require Python's lock. The queue keeps the call
  /// until the next one.
  void release_tensors() {
    std::unique_ptr<CallRequest> completed;  // released after the lock
    const std::lock_guard held(mutex_);
    completed = std::move(request_);
  }
  void enqueue_as_posted() {
    communicator_->require_usable(op_);
    enqueue(*communicator_, *request_, current_stream(communicator_->options().device));
  }

  const std::shared_ptr<Communicator> communicator_;
  const char* const op_;
  std::unique_ptr<CallRequest> request_;
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
  std::vector<Done> callbacks_;
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

Callbacks Queue::run_next(std::unique_lock<std::mutex>& held) {
  running_ = true;
  // The queue keeps the call until it has been counted.
  CpuPostedCall& call = *calls_[completed_.load(std::memory_order_relaxed) - first_];
  held.unlock();
  Callbacks callbacks = call.run();
  held.lock();
  running_ = false;
  completed_.fetch_add(1, std::memory_order_release);
  changed_.notify_all();
  return callbacks;
}

void Queue::run_next_and_callbacks(std::unique_lock<std::mutex>& held) {
  Callbacks callbacks = run_next(held);
  if (callbacks.functions.empty()) return;
  held.unlock();
  callbacks.run();
  held.lock();
}

void Queue::run_until(const CpuPostedCall& call) {
  std::unique_lock held(mutex_);
  while (!call.is_completed() && may_run()) run_next_and_callbacks(held);
}

void Queue::run_until_empty() {
  Calls completed;
  std::unique_lock held(mutex_);
  while (!is_empty()) {
    changed_.wait(held, [this] { return !running_; });
    if (may_run()) run_next_and_callbacks(held);
  }
  take_completed(completed);
  held.unlock();
}

bool Queue::await_call(std::unique_lock<std::mutex>& held) {
  for (bool looks = true; looks && is_empty();) {
    const uint64_t seen = posted_.load(std::memory_order_relaxed);
    held.unlock();
    looks = soon(kLooks, [&] { return posted_.load(std::memory_order_acquire) != seen; });
    if (looks) {
      soon(kHeadStart, [this] { return running_ || is_empty(); });
      soon(kLooks, [this] { return !running_; });
    }
    held.lock();
  }
  changed_.wait(held, [this] { return may_run() || (closed_ && is_empty()); });
  return !is_empty();
}

void Queue::work() {
  std::unique_lock held(mutex_);
  for (;;) {
    ++spare_;
    unattended_.wait(held, [this] { return !attended_; });
    --spare_;
    attended_ = true;
    Callbacks callbacks;
    while (callbacks.functions.empty() && await_call(held)) callbacks = run_next(held);
    attended_ = false;
    unattended_.notify_one();
    if (callbacks.functions.empty()) return;
    if (spare_ == 0) start();
    held.unlock();
    callbacks.run();
    held.lock();
  }
}

void Queue::start() {
  threads_.emplace_back([queue = shared_from_this()] { queue->work(); });
}

void Queue::close() {
  std::unique_lock held(mutex_);
  closed_ = true;
  changed_.notify_all();
  while (!threads_.empty()) {
    std::thread thread = std::move(threads_.back());
    threads_.pop_back();
    held.unlock();
    // A callback may destroy the communicator.
    thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
    held.lock();
  }
}

class CpuPoster final : public Poster {
 public:
  CpuPoster() { queue_->start(); }
  ~CpuPoster() override { close(); }

  std::shared_ptr<PostedCall> post(Communicator& communicator,
                                   std::unique_ptr<CallRequest> request) override {
    auto call = std::make_shared<CpuPostedCall>(communicator.shared_from_this(), std::move(request),
                                                queue_);
    queue_->add(call, communicator);
    return call;
  }

  bool has_pending() const override { return !queue_->is_empty(); }
  void let_pass() override { queue_->run_until_empty(); }

  void close() override {
    queue_->close();
    queue_->run_until_empty();
  }

 private:
  const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
};

}  // namespace

std::unique_ptr<Poster> make_cpu_poster() { return std::make_unique<CpuPoster>(); }

}  // namespace collx
