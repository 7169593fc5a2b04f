// Kernels with an epilogue, which are compiled at their first use. This header includes neither
// Torch nor CUDA headers, like device.h.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "../protocol/epilogue_program.h"

namespace collx::cuda {

/// Returns the machine code of a kernel for the current device. If this fails, it throws an error
/// that names the operator `op`.
using MakeKernel = std::string (*)(const char* op, const std::string& program,
                                   const std::string& kernel);

/// The kernels of one expression for one dtype. They stay loaded even after the expression is
/// dropped: a captured graph may contain one, and CUDA does not report this.
class EpilogueKernels {
 public:
  /// `expression` must outlive this object.
  EpilogueKernels(const Expression& expression, DType dtype)
      : expression_(expression), dtype_(dtype) {}

  /// The source that is compiled.
  std::string program(const ProgramOptions& options) const;

  /// Finds the kernel for the current device, and loads it if necessary. `blocks` blocks of
  /// kFullBlock threads must be resident at once: throws std::runtime_error if the device does not
  /// hold so many.
  const void* find(const ProgramOptions& options, int blocks, const char* op, MakeKernel make);

 private:
  struct Entry {
    ProgramOptions options;
    int device;
    const void* kernel;
    int held;  // blocks of kFullBlock threads
  };

  const Expression& expression_;
  const DType dtype_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

/// The epilogue of one call.
struct EpilogueCall {
  EpilogueKernels& kernels;
  const char* op;
  MakeKernel make;
  bool launches;  // false: the kernel is only prepared
  EpilogueArguments arguments = {};
  EpilogueForm form = {};
};

}  // namespace collx::cuda
