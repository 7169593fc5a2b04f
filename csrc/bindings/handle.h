// The handle of a posted call.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "../ops/posting.h"

namespace collx {

/// `call` is null if no work is left. `result` is what the synchronous call would return. `tensors`
/// are its arguments and results.
pybind11::object make_handle(const char* function, std::shared_ptr<PostedCall> call,
                             pybind11::object result, std::vector<at::Tensor> tensors,
                             std::vector<at::Tensor> results);

void bind_handle(pybind11::module_& m);

}  // namespace collx
