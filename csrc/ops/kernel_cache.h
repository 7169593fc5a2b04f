// Compiled kernels on disk, in a folder that only this user can access.
#pragma once

#include <c10/macros/Export.h>

#include <cstdint>
#include <string>

namespace collx::kernel_cache {

/// Bytes in the folder, above which the files that have not been used for the longest time go.
inline constexpr uint64_t kMostBytes = uint64_t{256} << 20;

/// What was kept under that name, or nothing: also where the file is damaged, where it is a link,
/// or where anybody else can write it or the folder. A folder that others can write is named in a
/// warning.
C10_EXPORT std::string read(const std::string& folder, const std::string& name);

/// Creates the folder if it does not exist. A reader sees the complete file, however many
/// threads and processes write it. What cannot be written is not kept.
C10_EXPORT void keep(const std::string& folder, const std::string& name, const std::string& code,
                     uint64_t most_bytes = kMostBytes);

}  // namespace collx::kernel_cache
