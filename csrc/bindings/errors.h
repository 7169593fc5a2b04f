// collx's errors in Python: their classes, and their records.
#pragma once

#include <pybind11/pybind11.h>

#include "../protocol/status.h"

namespace collx {

/// A call as a dict: operator, tensors and algorithm.
pybind11::dict call_dict(const CallDescriptor& call);

/// A record as a dict, whose keys python/collx/errors.py documents.
pybind11::dict record_dict(const StatusRecord& record);

/// Adds two functions to `module`. Python calls `raise_as` to set the exceptions of the operators,
/// and `after_failure` to set a function that is called with a communicator's name before its
/// failure is raised. That function must not raise.
void bind_errors(pybind11::module_& module);

}  // namespace collx
