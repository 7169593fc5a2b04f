// Functions with which symmetric memory releases Python's lock while it waits for a peer.
#pragma once

#include "../memory/interpreter_lock.h"

namespace collx {

memory::InterpreterLock python_lock();

}  // namespace collx
