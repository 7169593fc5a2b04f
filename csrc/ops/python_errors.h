// Makes collx's exception classes known to Python.
#pragma once

struct _object;

namespace collx {

/// Adds the classes to `module` (a Python module object) and their translation to pybind11.
void bind_errors(_object* module);

}  // namespace collx
