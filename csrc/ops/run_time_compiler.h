// Compiles kernels on first use with the NVRTC that PyTorch ships, and caches them on disk.
#pragma once

#include <c10/macros/Export.h>

#include <cstdint>
#include <string>

namespace collx {

/// Returns the machine code, for the current device, of one kernel of a program that includes this
/// library's headers. The disk cache is keyed by content, architecture, driver and compiler. Raises
/// RuntimeError during a capture, or if the program does not compile; the message names `op`.
std::string make_kernel(const char* op, const std::string& program, const std::string& kernel);

/// Numbers of kernels that this process has compiled and that it has found on disk.
struct MadeKernels {
  uint64_t compiled = 0;
  uint64_t found = 0;
};
C10_EXPORT MadeKernels made_kernels();

}  // namespace collx
