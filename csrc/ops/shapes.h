// The shapes of the collectives' results, and the checks of the arguments that determine them. The
// operators and their Meta kernels share this code.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include "../protocol/geometry.h"
#include "operator_table.h"

namespace collx {

using Sizes = c10::SymDimVector;

/// Returns the axis, counted from 0. Raises ValueError if the tensor does not have it.
int64_t check_axis(const char* op, const at::Tensor& input, int64_t axis);

/// The sizes of the result, according to the input and output extents in collectives.h: those of
/// the input, of this rank's part of the input, or of the tensor of which the input is this rank's
/// part. The rank is looked up only if the parts are uneven.
Sizes result_sizes(const Arguments& arguments);
/// The sizes [capacity, ...].
Sizes device_splits_sizes(const Arguments& arguments);

/// The geometry of an unsplit tensor with these sizes: see geometry.h.
Geometry geometry_of(at::IntArrayRef sizes, int64_t axis, size_t itemsize);
/// The geometry of a tensor that is not divided.
Geometry undivided(const at::Tensor& tensor);
/// The geometry of a tensor that is divided by rows, with a separate count for each rank.
Geometry rows_of(const at::Tensor& tensor);

}  // namespace collx
