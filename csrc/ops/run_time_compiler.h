// Kernels that are compiled when they are first needed, by the NVRTC that comes with PyTorch, and
// kept on disk.
#pragma once

#include <c10/macros/Export.h>

#include <cstdint>
#include <string>

namespace collx {

/// Machine code for the current device of one kernel of a program that includes this library's
/// headers. From the disk where it was compiled before: by content, architecture, driver and
/// compiler. RuntimeError during a capture, or where it does not compile; `op` is named.
std::string make_kernel(const char* op, const std::string& program, const std::string& kernel);

/// How many this process has compiled, and how many it found on disk.
struct MadeKernels {
  uint64_t compiled = 0;
  uint64_t found = 0;
};
C10_EXPORT MadeKernels made_kernels();

}  // namespace collx
