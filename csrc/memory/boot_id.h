// Identifies this machine, also among hosts that share a name (hazard 22).
#pragma once

#include <c10/macros/Export.h>

#include <string>

namespace collx::memory {

/// The kernel's boot id, 36 characters. Containers of one machine have the same. Throws
/// std::runtime_error where /proc does not show it.
C10_EXPORT std::string boot_id();

}  // namespace collx::memory
