// The parts of the module collx._C that consist of one function each.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "../ops/communicator.h"

namespace collx {

/// Binds the classes of collx.backend.
void bind_backend(pybind11::module_& module);

/// Binds the Python functions of the operators as built-in functions.
void bind_functions(pybind11::module_& m);

/// Binds the last calls of a communicator, the number of calls, and the progress of the ranks.
void bind_statistics(pybind11::class_<Communicator, std::shared_ptr<Communicator>>& communicator);

}  // namespace collx
