// Operators as Python functions, called in less time than by torch.ops.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace collx {

/// A built-in function that takes what the overload takes, but for the tensors of a form with out=:
/// these are the last ones by position. It does what `usual` does, which is PyTorch's own call of
/// the overload.
pybind11::object quick_call(const std::string& name, const std::string& overload,
                            pybind11::object usual);

}  // namespace collx
