// Identifies this machine, even among hosts with the same name (hazard 22).
#pragma once

#include <c10/macros/Export.h>

#include <string>

namespace collx::memory {

/// The kernel's boot id, 36 characters. It is the same in all containers of a machine. Throws
/// std::runtime_error if /proc does not provide it.
C10_EXPORT std::string boot_id();

}  // namespace collx::memory
