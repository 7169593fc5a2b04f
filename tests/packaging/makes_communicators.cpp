// What a C++ library does that makes communicators: a backend of torch.distributed, say.
#include <torch/library.h>

#include <string>

#include "../../csrc/ops/registry.h"

namespace {

/// Whether the registry has what was made for that process group.
bool make(const std::string& group) {
  const auto made = collx::registry::make(group);
  return made != nullptr && collx::registry::find(group) == made;
}

}  // namespace

TORCH_LIBRARY(makes_communicators, library) {
  library.def("make(str group) -> bool", [](std::string group) { return make(group); });
}

/// The same for a caller that holds Python's lock.
extern "C" C10_EXPORT bool make_with_lock(const char* group) { return make(group); }
