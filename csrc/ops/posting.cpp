#include "posting.h"

#include <sstream>
#include <utility>

#include "communicator.h"
#include "enqueue.h"
#include "errors.h"

namespace collx {

namespace {

thread_local Posting* current_posting = nullptr;

}  // namespace

Posting::Posting(std::function<void()> then) : outer_(current_posting), then_(std::move(then)) {
  current_posting = this;
}
Posting::~Posting() { current_posting = outer_; }

Posting* Posting::current() {
  Posting* const posting = current_posting;
  return posting != nullptr && posting->posted_ == nullptr ? posting : nullptr;
}

void Posting::settle() {
  const Posting* const posting = current_posting;
  if (posting != nullptr && posting->posted_ != nullptr) posting->posted_->wait(std::nullopt, {});
}

void Posting::take(Communicator& communicator, std::unique_ptr<CallRequest> request) {
  request->own();
  if (then_) request->then(std::move(then_));
  posted_ = communicator.poster().post(communicator, std::move(request));
}

NotPosting::NotPosting() : suspended_(std::exchange(current_posting, nullptr)) {}
NotPosting::~NotPosting() { current_posting = suspended_; }

c10::intrusive_ptr<c10::ivalue::Future> future_of(PostedCall* call, std::vector<at::Tensor> results,
                                                  const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cuda()) continue;
    devices.push_back(tensor.device());
    break;
  }
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::move(devices));
  const auto complete = [future, results = std::move(results)](const std::exception_ptr& error) {
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(results));
    }
  };
  call == nullptr ? complete(nullptr) : call->when_completed(complete);
  return future;
}

void raise_not_completed(const Communicator& communicator, const char* op,
                         std::chrono::nanoseconds timeout) {
  const std::string& name = communicator.options().name;
  std::ostringstream out;
  out << "collx." << op << ": wait: the posted call has not completed within "
      << std::chrono::duration<double>(timeout).count()
      << " s and is still in progress (communicator \"" << name << "\")";
  raise_error({ErrorKind::timeout, out.str(), name, {}});
}

}  // namespace collx
