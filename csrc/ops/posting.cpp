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

Posting::Posting() : outer_(current_posting) { current_posting = this; }
Posting::~Posting() { current_posting = outer_; }

Posting* Posting::current() {
  Posting* const posting = current_posting;
  return posting != nullptr && posting->posted_ == nullptr ? posting : nullptr;
}

void Posting::take(Communicator& communicator, std::unique_ptr<CallRequest> request) {
  request->own();
  posted_ = communicator.poster().post(communicator, std::move(request));
}

void raise_not_completed(const Communicator& communicator, const char* op,
                         std::chrono::nanoseconds timeout) {
  const std::string& name = communicator.options().name;
  std::ostringstream out;
  out << "collx." << op << ": wait: the posted call has not completed within "
      << std::chrono::duration<double>(timeout).count() << " s, and goes on (communicator \""
      << name << "\")";
  raise_error({ErrorKind::timeout, out.str(), name, {}});
}

}  // namespace collx
