// PyTorch's Python bindings hold the interpreter's lock while they call an allocator or a handle. A
// wait for a peer must not block other threads of this process: the peer may wait for one of them,
// or one may be the watchdog. This library does not depend on Python, so the code that registers
// the allocator sets the functions that release and take the lock.
#pragma once

namespace collx::memory {

struct InterpreterLock {
  void* (*release)();               // returns null if this thread does not hold the lock
  void (*restore)(void*) noexcept;  // takes the lock again, given the result of release()
};

/// Set once, before the allocator is registered.
inline InterpreterLock interpreter_lock{};

/// Releases the lock for its scope, if this thread holds it.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock() : state_(interpreter_lock.release()) {}
  ~WithoutInterpreterLock() {
    if (state_ != nullptr) interpreter_lock.restore(state_);
  }
  WithoutInterpreterLock(const WithoutInterpreterLock&) = delete;
  WithoutInterpreterLock& operator=(const WithoutInterpreterLock&) = delete;

 private:
  void* state_;
};

}  // namespace collx::memory
