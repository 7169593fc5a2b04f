// collx's exception classes in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace collx {

/// Adds the classes to `module`; what the operators raise has them from then on.
void bind_errors(pybind11::module_& module);

}  // namespace collx
