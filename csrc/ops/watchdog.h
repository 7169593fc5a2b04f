// The watchdog: one thread of the process, which logs a call that has waited for more than a third
// of its timeout, and the ranks for which it waits.
//
// It reads how far the ranks have come from their regions, a dozen times in a timeout, and takes no
// part in calls. The thread exists only while a communicator uses it.
#pragma once

#include <atomic>
#include <cstdint>

namespace collx {

class Communicator;

/// What regions do not say of a communicator's calls. Written by the thread that makes a call.
class CallMarks {
 public:
  /// The process group carries out the call.
  class InGroup {
   public:
    explicit InGroup(CallMarks* marks) : marks_(marks) { set(true); }
    ~InGroup() { set(false); }
    InGroup(const InGroup&) = delete;
    InGroup& operator=(const InGroup&) = delete;

   private:
    void set(bool is) {
      if (marks_ != nullptr) marks_->in_group_.store(is, std::memory_order_release);
    }
    CallMarks* const marks_;
  };

  /// `number`: the calls before this one. `op` lives as long as the process.
  void begin(uint64_t number, const char* op) {
    ops_[number % kKept].store(op, std::memory_order_release);
  }

  bool in_group() const { return in_group_.load(std::memory_order_acquire); }
  /// Null for a call that is not one of the last kKept of the `begun` ones.
  const char* op(uint64_t number, uint64_t begun) const {
    return begun - number < kKept ? ops_[number % kKept].load(std::memory_order_acquire) : nullptr;
  }

 private:
  static constexpr uint64_t kKept = 64;
  std::atomic<const char*> ops_[kKept] = {};
  std::atomic<bool> in_group_{false};
};

namespace watchdog {

/// Watches the communicator until leave(). Starts the thread if there is none.
void enter(Communicator& communicator);
/// The communicator's timeout is another one from now on.
void timeout_changed(const Communicator& communicator);
/// After that nothing looks at the communicator or at its regions. Twice is harmless.
void leave(const Communicator& communicator);

}  // namespace watchdog
}  // namespace collx
