// Posted calls: they run while the program continues, until it waits for them.
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

/// A call that was posted. Any thread may wait for it, at any time, more than once.
class C10_EXPORT PostedCall {
 public:
  using Timeout = std::optional<std::chrono::nanoseconds>;

  virtual ~PostedCall() = default;
  PostedCall(const PostedCall&) = delete;
  PostedCall& operator=(const PostedCall&) = delete;

  virtual bool is_completed() = 0;
  /// On the CPU, returns when the call has completed, and raises what it raised. On CUDA, orders
  /// the current stream after the call and raises what is known; `tensors` are those of the call,
  /// which the caller may use on that stream. With a timeout the host waits for the call, at most
  /// that long. CollectiveTimeout then; the call continues.
  virtual void wait(Timeout timeout, const std::vector<at::Tensor>& tensors) = 0;
  /// Calls `done` with the failure, if there is one: on the CPU when the call has completed, on
  /// CUDA at once, with the stream of the call current.
  using Done = std::function<void(std::exception_ptr)>;
  virtual void when_completed(Done done) = 0;

 protected:
  PostedCall() = default;
};

/// A future of the results. `call`: null if there is nothing to wait for. `tensors`: all of the
/// call's; they tell the device.
C10_EXPORT c10::intrusive_ptr<c10::ivalue::Future> future_of(
    PostedCall* call, std::vector<at::Tensor> results, const std::vector<at::Tensor>& tensors);

/// Takes the next call that this thread makes, and posts it, with what is to follow it on its
/// stream.
class C10_EXPORT Posting {
 public:
  explicit Posting(std::function<void()> then = {});
  ~Posting();
  Posting(const Posting&) = delete;
  Posting& operator=(const Posting&) = delete;

  /// That of this thread, until it has taken a call.
  static Posting* current();
  void take(Communicator& communicator, std::unique_ptr<CallRequest> request);

  /// Null if no call was made.
  const std::shared_ptr<PostedCall>& posted() const { return posted_; }

 private:
  Posting* outer_;
  std::function<void()> then_;
  std::shared_ptr<PostedCall> posted_;
};

/// Carries out the posted calls of one communicator, in their order.
class Poster {
 public:
  virtual ~Poster() = default;
  virtual std::shared_ptr<PostedCall> post(Communicator& communicator,
                                           std::unique_ptr<CallRequest> request) = 0;
  /// Before a call that is not posted.
  virtual void let_pass() = 0;
  /// When the communicator has been destroyed: posted calls that have not begun raise that.
  virtual void close() = 0;
};

/// With a thread of its own, which sleeps when it is idle.
std::unique_ptr<Poster> make_cpu_poster();
/// With a stream of its own on that device.
std::unique_ptr<Poster> make_cuda_poster(c10::Device device);

[[noreturn]] void raise_not_completed(const Communicator& communicator, const char* op,
                                      std::chrono::nanoseconds timeout);

}  // namespace collx
