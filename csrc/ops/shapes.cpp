#include "shapes.h"

#include <c10/util/Exception.h>

#include "../protocol/partition.h"
#include "communicator.h"
#include "registry.h"

namespace collx {

namespace {

Sizes sizes_of(const at::Tensor& tensor) {
  const c10::SymIntArrayRef sizes = tensor.sym_sizes();
  return Sizes(sizes.begin(), sizes.end());
}

/// Exact on any rank where the parts are equal. Uneven ones are this rank's alone, and need
/// numbers.
c10::SymInt part_of(const char* op, const c10::SymInt& units, int64_t group_size,
                    std::string_view group_name) {
  if (TORCH_GUARD_OR_FALSE((units % group_size).sym_eq(0))) return units / group_size;
  const auto communicator = registry::require(op, group_name);
  return static_cast<int64_t>(partition(static_cast<uint64_t>(units.guard_int(__FILE__, __LINE__)),
                                        static_cast<int>(group_size), communicator->options().rank)
                                  .count);
}

c10::SymInt sum_of(const char* op, const char* argument, c10::SymIntArrayRef splits) {
  c10::SymInt sum = 0;
  for (const c10::SymInt& rows : splits) {
    TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(rows.sym_ge(0)), "collx.", op, ": ", argument, ": got ",
                      splits, "; accepted: numbers of rows, none of them negative");
    sum = sum + rows;
  }
  return sum;
}

}  // namespace

int64_t check_axis(const char* op, const at::Tensor& input, int64_t axis) {
  const int64_t dims = input.dim();
  TORCH_CHECK_VALUE(dims > 0, "collx.", op,
                    ": input: got a tensor without axes; accepted: at least one");
  TORCH_CHECK_VALUE(axis >= -dims && axis < dims, "collx.", op, ": axis: got ", axis,
                    "; accepted for ", dims, " axes: ", -dims, " to ", dims - 1);
  return axis < 0 ? axis + dims : axis;
}

void check_has_rows(const char* op, const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() > 0, "collx.", op,
                    ": input: got a tensor without axes; accepted: at least one");
}

void check_group_size(const char* op, int64_t group_size) {
  TORCH_CHECK_VALUE(group_size >= 1 && group_size <= kMaxRanks, "collx.", op, ": group_size: got ",
                    group_size, "; accepted: the communicator's world size");
}

Sizes reducescatter_sizes(const char* op, const at::Tensor& input, int64_t group_size, int64_t axis,
                          std::string_view group_name) {
  check_group_size(op, group_size);
  const auto along = static_cast<size_t>(check_axis(op, input, axis));
  Sizes sizes = sizes_of(input);
  sizes[along] = part_of(op, sizes[along], group_size, group_name);
  return sizes;
}

Sizes allgather_sizes(const char* op, const at::Tensor& input, int64_t group_size, int64_t axis,
                      const std::optional<c10::SymInt>& total) {
  check_group_size(op, group_size);
  const auto along = static_cast<size_t>(check_axis(op, input, axis));
  Sizes sizes = sizes_of(input);
  if (total) {
    TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(total->sym_ge(0)), "collx.", op, ": total: got ", *total,
                      "; accepted: 0 and more");
    sizes[along] = *total;
  } else {
    sizes[along] = sizes[along] * group_size;
  }
  return sizes;
}

Sizes gather_sizes(const char* op, const at::Tensor& input, int64_t group_size) {
  check_group_size(op, group_size);
  check_has_rows(op, input);
  Sizes sizes = sizes_of(input);
  sizes[0] = sizes[0] * group_size;
  return sizes;
}

Sizes scatter_sizes(const char* op, const at::Tensor& input, int64_t group_size) {
  Sizes sizes = alltoall_sizes(op, input, group_size);
  sizes[0] = sizes[0] / group_size;
  return sizes;
}

Sizes alltoall_sizes(const char* op, const at::Tensor& input, int64_t group_size) {
  check_group_size(op, group_size);
  check_has_rows(op, input);
  Sizes sizes = sizes_of(input);
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE((sizes[0] % group_size).sym_eq(0)), "collx.", op,
                    ": input: got ", sizes[0], " rows; accepted: a multiple of the group size, ",
                    group_size);
  return sizes;
}

Sizes alltoallv_sizes(const char* op, const at::Tensor& input, c10::SymIntArrayRef output_splits,
                      c10::SymIntArrayRef input_splits) {
  check_has_rows(op, input);
  TORCH_CHECK_VALUE(output_splits.size() == input_splits.size() && !input_splits.empty(), "collx.",
                    op, ": output_splits, input_splits: got ", output_splits.size(), " and ",
                    input_splits.size(), " numbers; accepted: one for each rank");
  const c10::SymInt sent = sum_of(op, "input_splits", input_splits);
  Sizes sizes = sizes_of(input);
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(sent.sym_eq(sizes[0])), "collx.", op,
                    ": input_splits: got ", input_splits, ", which add up to ", sent,
                    "; accepted: the rows of the input, ", sizes[0]);
  sizes[0] = sum_of(op, "output_splits", output_splits);
  return sizes;
}

Sizes device_splits_sizes(const char* op, const at::Tensor& input, const at::Tensor& input_splits,
                          const c10::SymInt& capacity) {
  check_has_rows(op, input);
  TORCH_CHECK_TYPE(input_splits.scalar_type() == at::kLong, "collx.", op,
                   ": input_splits: got dtype ", input_splits.scalar_type(), "; accepted: int64");
  TORCH_CHECK_VALUE(input_splits.dim() == 1, "collx.", op, ": input_splits: got ",
                    input_splits.dim(), " axes; accepted: one, with a number for each rank");
  TORCH_CHECK_VALUE(input_splits.device() == input.device(), "collx.", op,
                    ": input_splits: got a tensor on ", input_splits.device(),
                    "; accepted: the input's device, ", input.device());
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(capacity.sym_ge(0)), "collx.", op, ": capacity: got ",
                    capacity, "; accepted: 0 and more");
  Sizes sizes = sizes_of(input);
  sizes[0] = capacity;
  return sizes;
}

Geometry geometry_of(at::IntArrayRef sizes, int64_t axis, size_t itemsize) {
  Geometry g{1, static_cast<uint64_t>(sizes[static_cast<size_t>(axis)]), itemsize};
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (static_cast<int64_t>(i) < axis) g.outer *= static_cast<uint64_t>(sizes[i]);
    if (static_cast<int64_t>(i) > axis) g.inner *= static_cast<uint64_t>(sizes[i]);
  }
  return g;
}

Geometry undivided(const at::Tensor& tensor) { return {1, 1, tensor.nbytes()}; }

}  // namespace collx
