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

/// The size of a part. Equal parts have the same size on every rank. For uneven parts it is the
/// size on this rank, which requires a concrete number of units.
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
                      splits, "; accepted: numbers of rows, 0 or more each");
    const std::optional<int64_t> number = rows.maybe_as_int();
    TORCH_CHECK_VALUE(!number || !c10::add_overflows(known, *number, &known), "collx.", op, ": ",
                      argument, ": got ", splits,
                      ", whose sum exceeds int64; accepted: numbers of rows of a tensor");
    sum = sum + rows;
  }
  return sum;
}

/// Rejects a result whose number of bytes would overflow. `given` is the value of `argument`, which
/// determines the sizes.
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
                    "; accepted: sizes whose number of bytes fits int64");
}

/// Checks a tensor that is divided along its first axis.
void check_has_rows(const char* op, const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() > 0, "collx.", op,
                    ": input: got a tensor without axes; accepted: at least one");
}

}  // namespace

int64_t check_axis(const char* op, const at::Tensor& input, int64_t axis) {
  const int64_t dims = input.dim();
  check_has_rows(op, input);
  TORCH_CHECK_VALUE(axis >= -dims && axis < dims, "collx.", op, ": axis: got ", axis,
                    "; accepted for ", dims, " axes: ", -dims, " to ", dims - 1);
  return axis < 0 ? axis + dims : axis;
}

namespace {

/// This rank's part of the input along the axis.
Sizes sizes_of_part(const Arguments& a) {
  const auto along = static_cast<size_t>(check_axis(a.op(), a.input, a.axis));
  Sizes sizes = sizes_of(a.input);
  sizes[along] = part_of(a.op(), sizes[along], a.group_size, a.group_name);
  return sizes;
}

/// The sizes of the tensor of which the input is one part. Parts are even unless `total` is given.
Sizes sizes_of_whole(const Arguments& a) {
  const auto along = static_cast<size_t>(check_axis(a.op(), a.input, a.axis));
  Sizes sizes = sizes_of(a.input);
  if (a.total) {
    TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(a.total->sym_ge(0)), "collx.", a.op(), ": total: got ",
                      *a.total, "; accepted: 0 or more");
    sizes[along] = *a.total;
  } else {
    sizes[along] = sizes[along] * a.group_size;
  }
  return sizes;
}

/// Equal parts along the first axis: [n, ...] from [group_size * n, ...], the reverse, or the same
/// sizes.
Sizes sizes_of_equal_parts(const Arguments& a) {
  const CollectiveRow& row = row_of(a.collective);
  check_has_rows(a.op(), a.input);
  Sizes sizes = sizes_of(a.input);
  if (row.input == Extent::part) {
    sizes[0] = sizes[0] * a.group_size;
    return sizes;
  }
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE((sizes[0] % a.group_size).sym_eq(0)), "collx.", a.op(),
                    ": input: got ", sizes[0], " rows; accepted: a multiple of the group size, ",
                    a.group_size);
  if (row.output == Extent::part) sizes[0] = sizes[0] / a.group_size;
  return sizes;
}

Sizes sizes_by_splits(const Arguments& a) {
  const char* const op = a.op();
  check_has_rows(op, a.input);
  TORCH_CHECK_VALUE(a.output_splits.size() == a.input_splits.size() && !a.input_splits.empty(),
                    "collx.", op, ": output_splits, input_splits: got ", a.output_splits.size(),
                    " and ", a.input_splits.size(), " numbers; accepted: one for each rank");
  const c10::SymInt sent = sum_of(op, "input_splits", a.input_splits);
  Sizes sizes = sizes_of(a.input);
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(sent.sym_eq(sizes[0])), "collx.", op,
                    ": input_splits: got ", c10::SymIntArrayRef(a.input_splits),
                    ", which add up to ", sent, "; accepted: the rows of the input, ", sizes[0]);
  sizes[0] = sum_of(op, "output_splits", a.output_splits);
  check_bytes(op, "output_splits", c10::SymIntArrayRef(a.output_splits), sizes, a.input);
  return sizes;
}

}  // namespace

Sizes result_sizes(const Arguments& a) {
  if (row_of(a.collective).counted) return sizes_by_splits(a);
  if (!has_parts(a.collective)) return sizes_of(a.input);
  TORCH_CHECK_VALUE(a.group_size >= 1 && a.group_size <= kMaxRanks, "collx.", a.op(),
                    ": group_size: got ", a.group_size,
                    "; accepted: the communicator's world size");
  if (has_equal_parts(a.collective)) return sizes_of_equal_parts(a);
  return row_of(a.collective).input == Extent::part ? sizes_of_whole(a) : sizes_of_part(a);
}

Sizes device_splits_sizes(const Arguments& a) {
  const char* const op = a.op();
  const at::Tensor& splits = a.device_splits;
  check_has_rows(op, a.input);
  TORCH_CHECK_TYPE(splits.scalar_type() == at::kLong, "collx.", op, ": input_splits: got dtype ",
                   splits.scalar_type(), "; accepted: int64");
  TORCH_CHECK_VALUE(splits.dim() == 1, "collx.", op, ": input_splits: got ", splits.dim(),
                    " axes; accepted: one, with a number for each rank");
  TORCH_CHECK_VALUE(splits.device() == a.input.device(), "collx.", op,
                    ": input_splits: got a tensor on ", splits.device(),
                    "; accepted: the input's device, ", a.input.device());
  TORCH_CHECK_VALUE(TORCH_GUARD_OR_TRUE(a.capacity.sym_ge(0)), "collx.", op, ": capacity: got ",
                    a.capacity, "; accepted: 0 or more");
  Sizes sizes = sizes_of(a.input);
  sizes[0] = a.capacity;
  check_bytes(op, "capacity", a.capacity, sizes, a.input);
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
