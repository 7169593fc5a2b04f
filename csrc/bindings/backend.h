#pragma once

#include <torch/csrc/utils/pybind.h>

namespace collx {

/// collx.backend's classes.
void bind_backend(pybind11::module_& module);

}  // namespace collx
