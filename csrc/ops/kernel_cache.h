// Compiled kernels on disk, in a folder that only this user can access.
#pragma once

#include <c10/macros/Export.h>

#include <cstdint>
#include <string>

namespace collx::kernel_cache {

/// The size limit of the folder in bytes. Beyond it, the least recently used files are removed.
inline constexpr uint64_t kMostBytes = uint64_t{256} << 20;

/// Returns the code stored under the name. Returns an empty string if there is none, if the file is
/// damaged or a link, or if another user can write to the file or the folder. Logs a warning if
/// another user can write to the folder.
C10_EXPORT std::string read(const std::string& folder, const std::string& name);

/// Stores the code; creates the folder if it does not exist. Readers only see complete files, even
/// if several threads and processes write the same one. Write errors are ignored.
C10_EXPORT void keep(const std::string& folder, const std::string& name, const std::string& code,
                     uint64_t most_bytes = kMostBytes);

}  // namespace collx::kernel_cache
