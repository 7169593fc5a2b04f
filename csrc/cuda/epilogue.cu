#include <cstddef>

#include "arguments/norm_arguments.cuh"
#include "epilogue.h"
#include "launch.h"
#include "transports/lanes.cuh"

namespace collx::cuda {
namespace {

// A launch reads only as many bytes as the kernel's parameters have.
static_assert(offsetof(ExtraArguments<1>, extra) == offsetof(EpilogueArguments, extra));

/// Adds checks that the kernel's arguments have the same sizes as in this build, because the
/// program's headers are read when it is compiled. A program knows only the types that its kernel
/// includes.
std::string with_sizes(std::string program, const KernelTemplate& kernel) {
  const auto has = [&](const char* type, size_t bytes) {
    program += std::string("static_assert(sizeof(collx::") + type +
               ") == " + std::to_string(bytes) + ", \"headers of another build\");\n";
  };
  has("cuda::KernelCall", sizeof(KernelCall));
  has("cuda::PullArguments", sizeof(PullArguments));
  has("cuda::MulticastArguments", sizeof(MulticastArguments));
  has("cuda::Routes", sizeof(Routes));
  has("EpilogueArguments", sizeof(EpilogueArguments));
  if (kernel.name.ends_with("_lanes")) has("cuda::LaneArguments", sizeof(LaneArguments));
  if (kernel.rows) {
    has("cuda::NormArguments", sizeof(NormArguments));
    has("cuda::GatheredRows", sizeof(GatheredRows));
  }
  return program;
}

Kernel load(const std::string& code) {
  cudaLibrary_t library = nullptr;
  require(cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
          "loading the kernel of an epilogue");
  cudaKernel_t kernel = nullptr;
  require(cudaLibraryEnumerateKernels(&kernel, 1, library), "finding the kernel of an epilogue");
  return kernel;
}

/// The number of blocks that the current device holds: see held_together.
int held_by_device(Kernel kernel, int device) {
  int multiprocessors = 0;
  require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "querying the device's attributes");
  return held_together(kernel, kFullBlock) * multiprocessors;
}

}  // namespace

Kernel find_with_epilogue(const EpilogueCall& epilogue, ProgramOptions options, const Plan& plan) {
  options.epilogue = epilogue.form;
  const int full_blocks = ceil_div(plan.blocks * plan.threads, kFullBlock);
  const Kernel kernel = epilogue.kernels.find(options, full_blocks, epilogue.op, epilogue.make);
  return epilogue.launches ? kernel : nullptr;
}

std::string EpilogueKernels::program(const ProgramOptions& options) const {
  return with_sizes(epilogue_program(expression_, dtype_, options), options.kernel);
}

Kernel EpilogueKernels::find(const ProgramOptions& options, int blocks, const char* op,
                             MakeKernel make) {
  int device = 0;
  require(cudaGetDevice(&device), "querying the current device");
  const std::lock_guard guard(mutex_);
  const Entry* found = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.device == device && entry.options == options) found = &entry;
  }
  if (found == nullptr) {
    const Kernel kernel = load(make(op, program(options), kernel_in_program(expression_, options)));
    prepare(kernel);
    entries_.push_back({options, device, kernel, held_by_device(kernel, device)});
    found = &entries_.back();
  }
  if (blocks > found->held) {
    throw std::runtime_error("collx: the device can run at most " + std::to_string(found->held) +
                             " blocks of this epilogue's kernel at once, but the call needs " +
                             std::to_string(blocks) +
                             "; pass max_blocks=" + std::to_string(found->held) + " or less");
  }
  return found->kernel;
}

}  // namespace collx::cuda
