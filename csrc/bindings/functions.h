// Binds the Python functions of the operators as built-in functions.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace collx {

void bind_functions(pybind11::module_& m);

}  // namespace collx
