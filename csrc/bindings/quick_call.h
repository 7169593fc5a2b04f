// Operators as Python functions, called in less time than by torch.ops.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace collx {

/// A function of what the overload must be given, of its options by name (None: of none), and of
/// the tensors for its results. It does what `usual` does, which is PyTorch's own call of the
/// overload.
pybind11::cpp_function quick_call(const std::string& name, const std::string& overload,
                                  pybind11::object usual);

}  // namespace collx
