// collx's errors in Python: their classes, and the record that they carry.
#pragma once

#include <pybind11/pybind11.h>

#include "../protocol/status.h"

namespace collx {

/// A record as a dict, whose keys python/collx/errors.py documents.
pybind11::dict record_dict(const StatusRecord& record);

/// Adds `raise_as` to `module`, with which Python sets the exceptions of the operators.
void bind_errors(pybind11::module_& module);

}  // namespace collx
