// The parts of the module collx._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "../ops/communicator.h"

namespace collx {

/// Binds the classes of collx.backend.
void bind_backend(pybind11::module_& module);

/// Adds two functions to `module`. Python calls `raise_as` to set the exceptions of the operators,
/// and `after_failure` to set a function that is called with a communicator's name before its
/// failure is raised. That function must not raise.
void bind_errors(pybind11::module_& module);

/// A call as a dict: operator, tensors and algorithm.
pybind11::dict call_dict(const CallDescriptor& call);
/// A record as a dict, whose keys python/collx/errors.py documents.
pybind11::dict record_dict(const StatusRecord& record);

/// Binds the Python functions of the operators as built-in functions.
void bind_functions(pybind11::module_& m);

/// Binds the class of the handles of posted calls.
void bind_handle(pybind11::module_& m);

/// `call` is null if no work is left. `result` is what the synchronous call would return. `tensors`
/// are its arguments and results.
pybind11::object make_handle(const char* function, std::shared_ptr<PostedCall> call,
                             pybind11::object result, std::vector<at::Tensor> tensors,
                             std::vector<at::Tensor> results);

/// Binds the last calls of a communicator, the number of calls, and the progress of the ranks.
void bind_statistics(pybind11::class_<Communicator, std::shared_ptr<Communicator>>& communicator);

}  // namespace collx
