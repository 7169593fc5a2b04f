// Converts Python values to arguments of operators without PyTorch's parser.
#pragma once

#include <ATen/core/function_schema.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace collx {

/// Converts the value to the argument. Returns nullopt if PyTorch must convert or reject it: for a
/// tensor subclass, a symbol of a tracer, or a value of a different type.
std::optional<c10::IValue> converted(PyObject* value, const c10::Argument& argument);

/// The same for a string.
std::optional<c10::IValue> converted_text(PyObject* value);

}  // namespace collx
