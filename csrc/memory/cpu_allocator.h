// PyTorch's symmetric memory on the CPU: torch.distributed._symmetric_memory.empty(device="cpu"),
// rendezvous(), get_buffer(), get_signal_pad(), barrier(), put_signal() and wait_signal().
#pragma once

#include <c10/macros/Export.h>

#include "interpreter_lock.h"

namespace collx::memory {

/// Registers the allocator with PyTorch for c10::DeviceType::CPU. May be called any number of
/// times, from any thread. Throws c10::Error if another package has already registered an
/// allocator.
C10_EXPORT void register_cpu_allocator(InterpreterLock lock);

}  // namespace collx::memory
