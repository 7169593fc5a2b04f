// The operator that applies an epilogue to a tensor which is there already, and its derivative.
#pragma once

#include <torch/library.h>

#include "epilogue.h"

namespace collx {

void define_epilogue(torch::Library& library);
void add_epilogue_kernel(torch::Library& library, c10::DispatchKey key);

bool wants_gradient(const at::Tensor& value, at::TensorList extras);
void refuse_forward_mode(const char* op, const at::Tensor& value, at::TensorList extras);

/// `made`, which something else has made of the value, as if the operator had done so.
at::Tensor as_if_applied(const at::Tensor& value, const at::Tensor& made, std::string_view text,
                         at::TensorList extras, Origin origin, at::ArrayRef<double> numbers);

}  // namespace collx
