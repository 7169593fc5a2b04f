#pragma once

#include <torch/csrc/utils/pybind.h>

namespace collx {

/// Binds the classes of collx.backend.
void bind_backend(pybind11::module_& module);

}  // namespace collx
