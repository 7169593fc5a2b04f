// Kernels with an epilogue, which are compiled when they are first asked for. No Torch here, and no
// CUDA header, as in device.h.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "../protocol/epilogue_program.h"

namespace collx::cuda {

/// Machine code of a kernel for the current device. Throws where that cannot be had, in the name of
/// the operator that needs it.
using MakeKernel = std::string (*)(const char* op, const std::string& program,
                                   const std::string& kernel);

/// The kernels of one expression of one dtype. They stay loaded, also when the expression is
/// forgotten: a captured graph may hold one, and CUDA does not tell.
class EpilogueKernels {
 public:
  /// `expression` lives as long.
  EpilogueKernels(const Expression& expression, DType dtype)
      : expression_(expression), dtype_(dtype) {}

  /// What is compiled.
  std::string program(const ProgramOptions& options) const;

  /// For the current device, on which it is loaded then. `blocks`, of kFullBlock threads, have to
  /// be resident at once: std::runtime_error where the device does not hold so many.
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
  bool launches;  // false: the kernel is made ready, and that is all
  EpilogueArguments arguments = {};
  EpilogueForm form = {};
};

}  // namespace collx::cuda
