#include "interpreter_lock.h"

#include <Python.h>
#include <unistd.h>

namespace collx {

namespace {

void* release() {
  return Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
}

void restore(void* state) noexcept {
  try {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  } catch (...) {
    // The interpreter is exiting. Before Python 3.14, it unwinds threads that then try to take the
    // lock, which destructors do not survive. Sleep until the process ends, as Python 3.14 does.
    for (;;) ::pause();
  }
}

}  // namespace

memory::InterpreterLock python_lock() { return {release, restore}; }

}  // namespace collx
