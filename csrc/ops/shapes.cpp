#include "shapes.h"

#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include "../protocol/partition.h"
#include "communicator.h"
#include "registry.h"
#include "torch_version.h"

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
  int64_t known = 0;  // of the splits that are not symbolic
  for (const c10::SymInt& rows : splits) {
    TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(rows.sym_ge(0)), "collx.", op, ": ", argument, ": got ",
                      splits, "; accepted: numbers of rows, none of them negative");
    const std::optional<int64_t> number = rows.maybe_as_int();
    TORCH_CHECK_VALUE(!number || !c10::add_overflows(known, *number, &known), "collx.", op, ": ",
                      argument, ": got ", splits,
                      ", whose sum is more than int64 can hold; "
                      "accepted: numbers of rows of a tensor");
    sum = sum + rows;
  }
  return sum;
}

/// Refuses a result that no memory can hold, whose number of bytes would wrap around. `given` is
/// the value of `argument`, from which the sizes follow.
template <typename T>
void check_bytes(const char* op, const char* argument, const T& given, const Sizes& sizes,
                 const at::Tensor& input) {
  int64_t bytes = static_cast<int64_t>(input.dtype().itemsize());
  bool empty = false, fits = true;
  for (const c10::SymInt& size : sizes) {
    const std::optional<int64_t> number = size.maybe_as_int();
    empty |= number == 0;
    fits &= !number || !c10::mul_overflows(bytes, *number, &bytes);
  }
  TORCH_CHECK_VALUE(empty || fits, "collx.", op, ": ", argument, ": got ", given,
                    ", for a result of shape ", c10::SymIntArrayRef(sizes), " and dtype ",
                    dtype_name(input.scalar_type()),
                    "; accepted: sizes whose bytes int64 can hold");
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

namespace {

/// This rank's part of the input along the axis.
Sizes sizes_of_part(const Arguments& g) {
  const auto along = static_cast<size_t>(check_axis(g.op(), g.input, g.axis));
  Sizes sizes = sizes_of(g.input);
  sizes[along] = part_of(g.op(), sizes[along], g.group_size, g.group_name);
  return sizes;
}

/// That of which the input is a part: of even ones, unless `total` says otherwise.
Sizes sizes_of_whole(const Arguments& g) {
  const auto along = static_cast<size_t>(check_axis(g.op(), g.input, g.axis));
  Sizes sizes = sizes_of(g.input);
  if (g.total) {
    TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(g.total->sym_ge(0)), "collx.", g.op(), ": total: got ",
                      *g.total, "; accepted: 0 and more");
    sizes[along] = *g.total;
  } else {
    sizes[along] = sizes[along] * g.group_size;
  }
  return sizes;
}

/// Equal parts along the first axis: [n, ...] of [group_size * n, ...], or the other way around, or
/// the same.
Sizes sizes_of_equal_parts(const Arguments& g) {
  const CollectiveRow& row = row_of(g.collective);
  check_has_rows(g.op(), g.input);
  Sizes sizes = sizes_of(g.input);
  if (row.input == Extent::part) {
    sizes[0] = sizes[0] * g.group_size;
    return sizes;
  }
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE((sizes[0] % g.group_size).sym_eq(0)), "collx.", g.op(),
                    ": input: got ", sizes[0], " rows; accepted: a multiple of the group size, ",
                    g.group_size);
  if (row.output == Extent::part) sizes[0] = sizes[0] / g.group_size;
  return sizes;
}

Sizes sizes_by_splits(const Arguments& g) {
  const char* const op = g.op();
  check_has_rows(op, g.input);
  TORCH_CHECK_VALUE(g.output_splits.size() == g.input_splits.size() && !g.input_splits.empty(),
                    "collx.", op, ": output_splits, input_splits: got ", g.output_splits.size(),
                    " and ", g.input_splits.size(), " numbers; accepted: one for each rank");
  const c10::SymInt sent = sum_of(op, "input_splits", g.input_splits);
  Sizes sizes = sizes_of(g.input);
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(sent.sym_eq(sizes[0])), "collx.", op,
                    ": input_splits: got ", c10::SymIntArrayRef(g.input_splits),
                    ", which add up to ", sent, "; accepted: the rows of the input, ", sizes[0]);
  sizes[0] = sum_of(op, "output_splits", g.output_splits);
  check_bytes(op, "output_splits", c10::SymIntArrayRef(g.output_splits), sizes, g.input);
  return sizes;
}

}  // namespace

Sizes result_sizes(const Arguments& g) {
  if (row_of(g.collective).counted) return sizes_by_splits(g);
  if (!has_parts(g.collective)) return sizes_of(g.input);
  check_group_size(g.op(), g.group_size);
  if (has_equal_parts(g.collective)) return sizes_of_equal_parts(g);
  return row_of(g.collective).input == Extent::part ? sizes_of_whole(g) : sizes_of_part(g);
}

Sizes device_splits_sizes(const Arguments& g) {
  const char* const op = g.op();
  const at::Tensor& splits = g.device_splits;
  check_has_rows(op, g.input);
  TORCH_CHECK_TYPE(splits.scalar_type() == at::kLong, "collx.", op, ": input_splits: got dtype ",
                   splits.scalar_type(), "; accepted: int64");
  TORCH_CHECK_VALUE(splits.dim() == 1, "collx.", op, ": input_splits: got ", splits.dim(),
                    " axes; accepted: one, with a number for each rank");
  TORCH_CHECK_VALUE(splits.device() == g.input.device(), "collx.", op,
                    ": input_splits: got a tensor on ", splits.device(),
                    "; accepted: the input's device, ", g.input.device());
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(g.capacity.sym_ge(0)), "collx.", op, ": capacity: got ",
                    g.capacity, "; accepted: 0 and more");
  Sizes sizes = sizes_of(g.input);
  sizes[0] = g.capacity;
  check_bytes(op, "capacity", g.capacity, sizes, g.input);
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

Geometry rows_of(const at::Tensor& tensor) {
  return geometry_of(tensor.sizes(), 0, tensor.element_size());
}

}  // namespace collx
