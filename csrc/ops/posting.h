// Posted calls: asynchronous calls that run while the program continues, until it waits for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/macros/Export.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace collx {

class CallRequest;
class Communicator;

/// A posted call. Any thread may wait for it at any time, any number of times.
class C10_EXPORT PostedCall {
 public:
  using Timeout = std::optional<std::chrono::nanoseconds>;

  virtual ~PostedCall() = default;
  PostedCall(const PostedCall&) = delete;
  PostedCall& operator=(const PostedCall&) = delete;

  virtual bool is_completed() const = 0;
  /// On the CPU, waits until the call has completed and rethrows its exception. On CUDA, orders the
  /// current stream after the call and raises any failure known so far; `tensors` are those of the
  /// call, which the caller may then use on that stream. With a timeout, the host waits for the
  /// call for at most that long and then raises CollectiveTimeout; the call continues.
  virtual void wait(Timeout timeout, const std::vector<at::Tensor>& tensors) = 0;
  /// Calls `done` with the failure, or null. On the CPU, this happens when the call has completed;
  /// on CUDA immediately, with the stream of the call as the current stream.
  using Done = std::function<void(std::exception_ptr)>;
  virtual void when_completed(Done done) = 0;

 protected:
  PostedCall() = default;
};

/// A future of the results. `call` is null if there is nothing to wait for. `tensors` are all
/// tensors of the call; they determine the device.
C10_EXPORT c10::intrusive_ptr<c10::ivalue::Future> future_of(
    PostedCall* call, std::vector<at::Tensor> results, const std::vector<at::Tensor>& tensors);

/// Intercepts the next call of this thread and posts it. `then` runs after the call on its stream.
class C10_EXPORT Posting {
 public:
  explicit Posting(std::function<void()> then = {});
  ~Posting();
  Posting(const Posting&) = delete;
  Posting& operator=(const Posting&) = delete;

  /// The active object of this thread, until it has taken a call.
  static Posting* current();
  /// Waits for the call that the object of this thread has taken, if any.
  static void settle();
  void take(Communicator& communicator, std::unique_ptr<CallRequest> request);

  /// Null if no call was made.
  const std::shared_ptr<PostedCall>& posted() const { return posted_; }

 private:
  Posting* outer_;
  std::function<void()> then_;
  std::shared_ptr<PostedCall> posted_;
};

/// During its lifetime, the calls of this thread are not posted.
class NotPosting {
 public:
  NotPosting();
  ~NotPosting();
  NotPosting(const NotPosting&) = delete;
  NotPosting& operator=(const NotPosting&) = delete;

 private:
  Posting* const suspended_;
};

/// Executes the posted calls of one communicator in order.
class Poster {
 public:
  virtual ~Poster() = default;
  virtual std::shared_ptr<PostedCall> post(Communicator& communicator,
                                           std::unique_ptr<CallRequest> request) = 0;
  /// True if let_pass() would wait.
  virtual bool has_pending() const = 0;
  /// Called before a call that is not posted.
  virtual void let_pass() = 0;
  /// Called after the communicator has been destroyed. Posted calls that have not begun then raise.
  virtual void close() = 0;
};

/// Creates a poster with a dedicated thread, which sleeps when it is idle. A thread that waits for
/// a call that has not begun runs it itself.
std::unique_ptr<Poster> make_cpu_poster();
/// Creates a poster with a dedicated stream on the device.
std::unique_ptr<Poster> make_cuda_poster(c10::Device device);

[[noreturn]] void raise_not_completed(const Communicator& communicator, const char* op,
                                      std::chrono::nanoseconds timeout);

}  // namespace collx
