// Meta kernels: shapes, dtypes and strides without data.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "generated.h"

namespace collx {

namespace {

at::Tensor new_tensor(const at::Tensor& input, c10::SymIntArrayRef sizes) {
  return at::empty_symint(sizes, input.options());
}

// While tracing no rank waits.
void barrier_meta(std::string_view) {}

}  // namespace

Sizes check_meta(const Given& given) {
  const char* const op = given.op();
  if (is_reduction(given.collective)) {
    check_reduction(given.collective, given.input, given.reduce_op, given.algorithm,
                    given.max_blocks);
  } else {
    check_copyable(op, "input", given.input);
    check_algorithm(op, given.collective, given.algorithm);
    check_max_blocks(op, given.max_blocks);
  }
  Sizes sizes = result_sizes(given);
  if (has_root(given.collective)) {
    // A group's size that is not given is not known here: then a root is checked against the most.
    check_root(op, given.root,
               has_parts(given.collective) ? static_cast<int>(given.group_size) : kMaxRanks);
  }
  return sizes;
}

at::Tensor new_meta(const Given& given) { return new_tensor(given.input, check_meta(given)); }

void check_out_meta(const Given& given, const at::Tensor& out) {
  check_out(given.op(), given.input, check_meta(given), out);
}

TORCH_LIBRARY_IMPL(collx, Meta, library) {
  operators::for_each([&]<typename Op>(Op) { Generated<Op>::add_meta(library); });
  library.impl("barrier", TORCH_FN(barrier_meta));
}

}  // namespace collx
