// Epilogues: elementwise expressions behind a reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "../protocol/expression.h"

namespace collx {

/// ValueError unless the text is an expression of a value of that dtype. Kept for the calls to
/// come.
std::shared_ptr<const Expression> check_expression(const char* op, std::string_view text,
                                                   at::ScalarType dtype);

at::ScalarType scalar_type_of(ValueType type);

/// One tensor for each that the expression takes, of the value's dtype and device, which broadcast
/// to `sizes`. What Meta can check as well.
void check_extras(const char* op, const Expression& expression, at::TensorList extras,
                  const at::Tensor& value, c10::SymIntArrayRef sizes);

/// Where the value's first element stands in the tensor whose coordinates are meant.
struct Origin {
  int64_t axis = 0;
  int64_t start = 0;
};

/// `out` may be `value`. Below autograd.
void apply(const Expression& expression, const at::Tensor& value, at::TensorList extras,
           Origin origin, const at::Tensor& out);

/// The same by PyTorch's own operators, on any device; and the gradients of value and extras, of
/// those that are differentiable, else undefined.
at::Tensor evaluate(const Expression& expression, const at::Tensor& value, at::TensorList extras,
                    Origin origin);
std::vector<at::Tensor> gradients(const Expression& expression, const at::Tensor& value,
                                  at::TensorList extras, Origin origin, const at::Tensor& gradient);

/// Coordinate `dim` of each element of a tensor of those sizes, of one element in other dimensions.
at::Tensor coordinate(at::IntArrayRef sizes, int64_t dim, Origin origin, const c10::Device& device);

}  // namespace collx
