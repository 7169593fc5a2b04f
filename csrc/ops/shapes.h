// Shapes of the collectives' results, and the checks of the arguments that they follow from: what
// the operators and their Meta kernels have in common.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include "../protocol/geometry.h"
#include "operator_table.h"

namespace collx {

using Sizes = c10::SymDimVector;

/// The axis, counted from 0. ValueError if the tensor does not have it.
int64_t check_axis(const char* op, const at::Tensor& input, int64_t axis);
/// A tensor that is divided along its first axis.
void check_has_rows(const char* op, const at::Tensor& input);
void check_group_size(const char* op, int64_t group_size);

/// Of the result, by what collectives.h says of input and output: the input's; or this rank's part
/// of it; or that of which the input is this rank's part. The rank is looked up only
/// when the parts are uneven.
Sizes result_sizes(const Arguments& arguments);
/// [capacity, ...].
Sizes device_splits_sizes(const Arguments& arguments);

/// What follows an unsplit tensor of that shape: geometry.h.
Geometry geometry_of(at::IntArrayRef sizes, int64_t axis, size_t itemsize);
/// A tensor that is not divided.
Geometry undivided(const at::Tensor& tensor);
/// One that is, by rows, in numbers of its own.
Geometry rows_of(const at::Tensor& tensor);

}  // namespace collx
