// Objects of which a process has one.
#pragma once

#include <pthread.h>

namespace collx {

/// The only T of this process. It is never destroyed, since threads may use it until the process
/// ends. Its `mutex` is held across fork(), so that a child never inherits it locked by a thread
/// that does not exist in the child. There, `in_child()` releases the mutex and returns itself, or
/// it returns a new object.
///
/// A library must create the object when it is loaded: a child that was forked while another thread
/// created it would wait forever.
template <typename T>
T& process_wide() {
  static T* only = nullptr;
  [[maybe_unused]] static const int registered = [] {
    only = new T;
    return pthread_atfork([] { only->mutex.lock(); }, [] { only->mutex.unlock(); },
                          [] { only = only->in_child(); });
  }();
  return *only;
}

}  // namespace collx
