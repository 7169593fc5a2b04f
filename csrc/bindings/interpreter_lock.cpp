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
    // The interpreter is ending. Before Python 3.14 it unwinds a thread that comes late, which no
    // destructor on the way survives. Sleep here until the process ends, as 3.14 itself does.
    for (;;) ::pause();
  }
}

}  // namespace

memory::InterpreterLock python_lock() { return {release, restore}; }

}  // namespace collx
