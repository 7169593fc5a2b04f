// The watchdog: a thread of the process that logs any call that has waited for more than a third of
// its timeout, and the ranks for which the call waits.
//
// It reads the progress of the ranks from their regions, a dozen times per timeout, and takes no
// part in calls. On CUDA it also estimates how long calls wait for each rank, by 40 samples per
// second. The thread exists only while a communicator uses it.
#pragma once

namespace collx {

class Communicator;

namespace watchdog {

/// Watches the communicator until leave(). Starts the thread if there is none.
void enter(Communicator& communicator);
/// Called when the communicator's timeout has changed.
void timeout_changed(const Communicator& communicator);
/// After it returns, the watchdog no longer reads the communicator or its regions. Idempotent.
void leave(const Communicator& communicator);

}  // namespace watchdog
}  // namespace collx
