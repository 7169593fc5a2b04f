// Shapes of the collectives' results, and the checks of the arguments that they follow from: what
// the operators and their Meta kernels have in common.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

#include "../protocol/exchange.h"

namespace collx {

using Sizes = c10::SymDimVector;

/// The axis, counted from 0. IndexError-like ValueError when the tensor has none of that number.
int64_t check_axis(const char* op, const at::Tensor& input, int64_t axis);
/// A tensor that is divided along its first axis.
void check_has_rows(const char* op, const at::Tensor& input);
void check_group_size(const char* op, int64_t group_size);

/// This rank's part of the input along `axis`. `rank` is asked for only when the parts are uneven.
Sizes reducescatter_sizes(const char* op, const at::Tensor& input, int64_t group_size, int64_t axis,
                          std::string_view group_name);
Sizes allgather_sizes(const char* op, const at::Tensor& input, int64_t group_size, int64_t axis,
                      const std::optional<c10::SymInt>& total);
/// [group_size * n, ...] of [n, ...].
Sizes gather_sizes(const char* op, const at::Tensor& input, int64_t group_size);
/// [n, ...] of [group_size * n, ...].
Sizes scatter_sizes(const char* op, const at::Tensor& input, int64_t group_size);
/// The input's, whose first size the group size divides.
Sizes alltoall_sizes(const char* op, const at::Tensor& input, int64_t group_size);
Sizes alltoallv_sizes(const char* op, const at::Tensor& input, c10::SymIntArrayRef output_splits,
                      c10::SymIntArrayRef input_splits);
/// [capacity, ...].
Sizes device_splits_sizes(const char* op, const at::Tensor& input, const at::Tensor& input_splits,
                          const c10::SymInt& capacity);

/// What stands behind an unsplit tensor of that shape: exchange.h.
Geometry geometry_of(at::IntArrayRef sizes, int64_t axis, size_t itemsize);
/// A tensor that is not divided.
Geometry undivided(const at::Tensor& tensor);

}  // namespace collx
