#include "work.h"

#include <algorithm>
#include <utility>

namespace collx::distributed {

Work::Work(int rank, c10d::OpType type, uint64_t number, const char* title,
           const std::optional<std::vector<at::Tensor>>& inputs)
    : c10d::Work(rank, type, title, inputs), number_(number) {}

void Work::set(Made made) {
  made_ = std::move(made);
  if (!recordFunctionEndCallback_) return;
  const auto end = [end = recordFunctionEndCallback_](const std::exception_ptr&) { end(); };
  made_.calls.empty() ? end(nullptr) : made_.calls.back()->when_completed(end);
}

bool Work::isCompleted() {
  return std::ranges::all_of(made_.calls, [](const auto& call) { return call->is_completed(); }) &&
         std::ranges::all_of(made_.inner, [](const auto& work) { return work->isCompleted(); }) &&
         (made_.ending == nullptr || made_.ending->reached());
}

bool Work::isSuccess() const {
  std::exception_ptr failed = exception();
  for (const auto& call : made_.calls) {
    if (!failed && call->is_completed()) {
      call->when_completed([&failed](std::exception_ptr error) { failed = std::move(error); });
    }
  }
  return !failed;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::seconds(1'000'000'000);
  PostedCall::Timeout limit = made_.host_waits;
  if (timeout > kNoTimeout) limit = std::min(timeout, kLongest);  // so that no clock overflows
  try {
    for (const auto& call : made_.calls) call->wait(limit, made_.tensors);
    for (const auto& work : made_.inner) work->wait(timeout);
  } catch (...) {
    if (made_.ending != nullptr) made_.ending->before_raising();
    const std::lock_guard held(mutex_);
    exception_ = std::current_exception();
    throw;
  }
  return true;
}

void Work::synchronize() { wait(kNoTimeout); }

std::vector<at::Tensor> Work::result() { return made_.results; }

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      made_.inner.empty(),
      "collx: get_future: coalesced calls of the inner process group have no future");
  // A call that was not posted keeps only its results, which determine the device.
  if (made_.calls.empty()) return future_of(nullptr, made_.results, made_.results);
  // The calls of a communicator complete in order.
  return future_of(made_.calls.back().get(), made_.results, made_.tensors);
}

uint64_t Work::getSequencenumber() const { return number_; }

#if COLLX_COMPLETION_HOOKS
uint64_t Work::getCompletionKey() const {
  return made_.ending == nullptr ? c10d::Work::getCompletionKey() : made_.ending->key;
}
#endif

}  // namespace collx::distributed
