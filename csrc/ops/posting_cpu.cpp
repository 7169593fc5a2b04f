// Posted calls on the CPU. Each communicator that posts has a thread.
#include <ATen/ThreadLocalState.h>

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

template <typename F>
bool soon(F holds) {
  for (const auto until = Clock::now() + kLooks; Clock::now() < until;) {
    if (holds()) return true;
    std::this_thread::yield();
  }
  return holds();
}

class CpuPostedCall final : public PostedCall {
 public:
  CpuPostedCall(std::shared_ptr<Communicator> communicator, std::unique_ptr<CallRequest> request)
      : communicator_(std::move(communicator)), request_(std::move(request)) {}

  /// Runs on the poster's thread.
  void run() {
    try {
      const at::ThreadLocalStateGuard as_posted(state_);
      communicator_->require_usable(request_->op());
      enqueue(*communicator_, *request_, current_stream(communicator_->options().device));
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

  bool is_completed() override { return completed_.load(std::memory_order_acquire); }

  void wait(Timeout timeout, const std::vector<at::Tensor>& /*tensors*/) override {
    if (!soon([&] { return is_completed(); })) {
      // A forked child has no thread that could complete the call.
      if (communicator_->forked()) communicator_->require_usable(request_->op());
      std::unique_lock held(mutex_);
      const auto completed = [&] { return is_completed(); };
      // The communicator's timeout bounds the call itself.
      if (!timeout) {
        changed_.wait(held, completed);
      } else if (!changed_.wait_for(held, *timeout, completed)) {
        held.unlock();
        raise_not_completed(*communicator_, request_->op(), *timeout);
      }
    }
    if (error_) raise_carried(error_);
  }

  void when_completed(Done done) override {
    {
      const std::lock_guard held(mutex_);
      if (!is_completed()) {
        waiting_.push_back(std::move(done));
        return;
      }
    }
    done(error_);
  }

 private:
  const std::shared_ptr<Communicator> communicator_;
  const std::unique_ptr<CallRequest> request_;
  const at::ThreadLocalState state_;
  std::exception_ptr error_;  // only the poster's thread accesses it until completed_ is set
  std::atomic<bool> completed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Done> waiting_;
};

class CpuPoster final : public Poster {
 public:
  CpuPoster() : thread_([this] { work(); }) {}
  ~CpuPoster() override { close(); }

  std::shared_ptr<PostedCall> post(Communicator& communicator,
                                   std::unique_ptr<CallRequest> request) override {
    auto call =
        std::make_shared<CpuPostedCall>(communicator.shared_from_this(), std::move(request));
    std::deque<std::shared_ptr<CpuPostedCall>> completed;
    {
      const std::lock_guard held(mutex_);
      if (closed_) communicator.refuse_if_destroyed(call->op());  // by another thread
      take_completed(completed);
      calls_.push_back(call);
      posted_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
    return call;
  }

  void let_pass() override {
    const auto none_left = [this] {
      return completed_.load(std::memory_order_acquire) == posted_.load(std::memory_order_acquire);
    };
    std::deque<std::shared_ptr<CpuPostedCall>> completed;
    std::unique_lock held(mutex_);
    changed_.wait(held, none_left);
    take_completed(completed);
    held.unlock();
  }

  void close() override {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard held(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
    std::deque<std::shared_ptr<CpuPostedCall>> completed;
    const std::lock_guard held(mutex_);
    take_completed(completed);
  }

 private:
  void work() {
    const CarryErrors for_those_who_wait;
    for (uint64_t next = 0;; ++next) {
      const auto posted = [&] { return posted_.load(std::memory_order_acquire) != next; };
      soon(posted);
      std::shared_ptr<CpuPostedCall> call;
      {
        std::unique_lock held(mutex_);
        changed_.wait(held, [&] { return closed_ || posted(); });
        if (!posted()) return;
        call = calls_[next - first_];
      }
      call->run();
      call.reset();  // not the last reference
      {
        const std::lock_guard held(mutex_);
        completed_.store(next + 1, std::memory_order_release);
      }
      changed_.notify_all();
    }
  }

  /// Moves completed calls out of the queue. Releasing their tensors may require Python's lock, for
  /// which the poster's thread must not wait. So other threads destroy the calls, after they have
  /// released this lock.
  void take_completed(std::deque<std::shared_ptr<CpuPostedCall>>& completed) {
    for (; first_ < completed_.load(std::memory_order_relaxed); ++first_) {
      completed.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<CpuPostedCall>> calls_;  // the first has number first_
  uint64_t first_ = 0;
  std::atomic<uint64_t> posted_{0}, completed_{0};
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Poster> make_cpu_poster() { return std::make_unique<CpuPoster>(); }

}  // namespace collx
