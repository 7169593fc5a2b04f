// PyTorch's Python bindings hold the interpreter's lock while they call into an allocator or a
// handle. A wait for a peer must not stop this process's other threads: they may be what the peer
// waits for, or the watchdog. This library does not depend on Python: the code that registers the
// allocator sets how.
#pragma once

namespace collx::memory {

struct InterpreterLock {
  void* (*release)();               // null when this thread does not hold it
  void (*restore)(void*) noexcept;  // takes it back, with what release() gave
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
