// Enqueues the calls of all operators on the backend.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <utility>

#include "call.h"

namespace collx {

/// The symmetric memory of a call's tensors, if they are symmetric.
struct Places {
  std::optional<SymmetricRange> input;
  std::optional<SymmetricRange> output;
};

class CallRequest;

/// A call that is being enqueued. Host steps that run operators of PyTorch make `stream` current
/// with UseStream.
struct Launch {
  Communicator& communicator;
  CallRequest& request;
  c10::Stream stream;
  std::optional<c10::Stream> posted_on = {};
};

/// A call whose arguments an operator has checked. A request owns what it refers to, except input
/// and output, which it borrows until own() is called. This saves two reference counts in a
/// synchronous call. After own() the request may outlive the operator, and any thread may enqueue
/// it on any stream that is ordered after the stream on which it was created. A request cannot be
/// moved because its members point to each other.
class CallRequest {
 public:
  virtual ~CallRequest() = default;
  CallRequest(const CallRequest&) = delete;
  CallRequest& operator=(const CallRequest&) = delete;

  const char* op() const { return op_; }

  /// Takes references to the tensors that the operator owns.
  virtual void own() {}

  /// Finds the memory that peers may access, and checks the requirements of the algorithm.
  virtual Places locate(Communicator& /*communicator*/) const { return {}; }
  /// Executes the whole call of a single rank. Called only if needs_no_peers().
  virtual void run_alone(const Launch& /*launch*/) {}
  /// Fills in the plan, the descriptor and the mapped addresses.
  virtual Call& plan(const Launch& launch, const Places& places) = 0;
  /// Runs the kernels of the plan. On the CPU, returns false if the communicator has failed.
  virtual bool run(const CpuView& view) const = 0;
#if COLLX_CUDA
  virtual void run(const CudaView& view, cuda::Stream stream) const = 0;
  /// Enqueues the copies of Algorithm::copy_engine.
  virtual void copy(const CudaView& view, cuda::CopyStreams& streams, cuda::Stream stream) const;
#endif
  /// Executes the call through the process group.
  virtual void run_through_group(const Launch& launch) const = 0;
  /// Makes `rest` run after the collective, on its stream.
  void then(std::function<void()> rest) { rest_ = std::move(rest); }
  /// Runs the work that follows the collective, on its stream. Called only if has_rest().
  void follow() const {
    if (has_rest_) finish();
    if (rest_) rest_();
  }

  /// Bytes of this rank's input.
  virtual uint64_t input_bytes() const { return 0; }

  Algorithm asked() const { return asked_; }
  bool needs_no_peers() const { return needs_no_peers_; }
  /// Whether no rank has work to do.
  bool is_empty() const { return is_empty_; }
  bool has_rest() const { return has_rest_ || rest_; }

 protected:
  /// Runs the operator's own work that follows the collective. Called only if has_rest_.
  virtual void finish() const {}

  /// `op` must live as long as the process.
  CallRequest(const char* op, Algorithm asked) : op_(op), asked_(asked) {}

  bool needs_no_peers_ = true;
  bool is_empty_ = false;
  bool has_rest_ = false;

 private:
  const char* op_;
  Algorithm asked_;
  std::function<void()> rest_;
};

/// The number of a call on its communicator: the call is enqueued when Communicator::calls() has
/// reached it. A call without work takes no number; its ticket is that of the preceding call.
using Ticket = uint64_t;

/// Executes the request on `stream` (on the CPU: before it returns), ordered after the
/// communicator's previous call. The caller must have called communicator.require_usable(). Later
/// work on `posted_on`, the stream of a posted call, runs beside the call.
Ticket enqueue(Communicator& communicator, CallRequest& request, c10::Stream stream,
               std::optional<c10::Stream> posted_on = std::nullopt);

/// The stream on which a synchronous call runs.
c10::Stream current_stream(c10::Device device);

/// Makes a request and enqueues it on the current stream, or posts it if the thread is posting.
template <typename R, typename... Given>
void make_call(Communicator& communicator, Given&&... given) {
  if (Posting* const posting = Posting::current()) {
    return posting->take(communicator,
                         std::make_unique<R>(communicator, std::forward<Given>(given)...));
  }
  communicator.let_posted_calls_pass();
  R request(communicator, std::forward<Given>(given)...);
  enqueue(communicator, request, current_stream(communicator.options().device));
}

/// Makes the stream of a CUDA device the current one during its lifetime.
class UseStream {
 public:
#if COLLX_CUDA
  explicit UseStream(c10::Stream stream);

 private:
  c10::cuda::OptionalCUDAStreamGuard guard_;
#else
  explicit UseStream(c10::Stream) {}
#endif
};

}  // namespace collx
