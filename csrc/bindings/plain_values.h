// Python values as arguments of operators, without PyTorch's parser.
#pragma once

#include <ATen/core/function_schema.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace collx {

/// The value as that argument. None where PyTorch has to convert or to refuse it: a tensor
/// subclass, a symbol of a tracer, a value of another type.
std::optional<c10::IValue> converted(PyObject* value, const c10::Argument& argument);

/// Likewise of a string.
std::optional<c10::IValue> converted_text(PyObject* value);

}  // namespace collx
