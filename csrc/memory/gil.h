// PyTorch's Python bindings hold the interpreter's lock while they call into an allocator or a
// handle. A wait for a peer must not stop this process's other threads: they may be what the peer
// waits for, or the watchdog.
#pragma once

#include <Python.h>

namespace collx::memory {

/// Releases the lock for its scope, if this thread holds it.
class WithoutGil {
 public:
  WithoutGil()
      : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace collx::memory
