// The time at which a wait ends.
#pragma once

#include <chrono>

namespace collx::memory {

using Deadline = std::chrono::steady_clock::time_point;

}  // namespace collx::memory
