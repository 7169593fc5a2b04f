// A C++ library that creates communicators, such as a backend of torch.distributed.
#include <torch/library.h>

#include <string>

#include "../../csrc/ops/registry.h"

namespace {

/// Creates a communicator of a process group. Returns whether the registry contains it.
bool make(const std::string& group) {
  const auto made = collx::registry::make(group);
  return made != nullptr && collx::registry::find(group) == made;
}

}  // namespace

TORCH_LIBRARY(makes_communicators, library) {
  library.def("make(str group) -> bool", [](std::string group) { return make(group); });
}

/// Does the same for a caller that holds the GIL.
extern "C" C10_EXPORT bool make_with_lock(const char* group) { return make(group); }
