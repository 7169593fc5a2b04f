// Operator schemas, and their kernels below autograd.
//
// Options are positional with defaults, since keyword-only integers break AOTInductor. What writes
// an argument returns nothing, since third-party operators may not return an alias of one.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "allreduce.h"
#include "checks.h"

namespace collx {

namespace {

constexpr const char* kOp = "allreduce";

at::Tensor allreduce_meta(const at::Tensor& input, std::string_view reduce_op, std::string_view,
                          std::string_view algorithm, int64_t max_blocks) {
  check_reduction(kOp, input, reduce_op, algorithm, max_blocks);
  return at::empty_symint(input.sym_sizes(), input.options());
}

void allreduce_out_meta(const at::Tensor& input, std::string_view reduce_op, std::string_view,
                        std::string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  check_reduction(kOp, input, reduce_op, algorithm, max_blocks);
  check_out_like(kOp, input, out);
}

void allreduce_inplace_meta(at::Tensor& input, std::string_view reduce_op, std::string_view,
                            std::string_view algorithm, int64_t max_blocks) {
  check_reduction(kOp, input, reduce_op, algorithm, max_blocks);
}

void add_kernels(torch::Library& library, c10::DispatchKey key) {
  library.impl("allreduce", torch::dispatch(key, TORCH_FN(allreduce)));
  library.impl("allreduce.out", torch::dispatch(key, TORCH_FN(allreduce_out)));
  library.impl("allreduce_", torch::dispatch(key, TORCH_FN(allreduce_inplace)));
}

}  // namespace

TORCH_LIBRARY(collx, library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
  const std::vector<at::Tag> out_tags = {tags[0], tags[1], at::Tag::out_variant};
  library.def(
      "allreduce(Tensor input, str reduce_op, str group_name, str algorithm=\"auto\", "
      "int max_blocks=0) -> Tensor",
      tags);
  library.def(
      "allreduce.out(Tensor input, str reduce_op, str group_name, str algorithm=\"auto\", "
      "int max_blocks=0, *, Tensor(a!) out) -> ()",
      out_tags);
  library.def(
      "allreduce_(Tensor(a!) input, str reduce_op, str group_name, str algorithm=\"auto\", "
      "int max_blocks=0) -> ()",
      tags);
  // The layouts that are refused get the same kernels, whose checks say what is accepted; without
  // one, the dispatcher's own message would name neither argument nor cure.
  for (const c10::DispatchKey key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::SparseCPU,
        c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCPU,
        c10::DispatchKey::SparseCsrCUDA, c10::DispatchKey::QuantizedCPU,
        c10::DispatchKey::QuantizedCUDA, c10::DispatchKey::MkldnnCPU}) {
    add_kernels(library, key);
  }
}

TORCH_LIBRARY_IMPL(collx, Meta, library) {
  library.impl("allreduce", TORCH_FN(allreduce_meta));
  library.impl("allreduce.out", TORCH_FN(allreduce_out_meta));
  library.impl("allreduce_", TORCH_FN(allreduce_inplace_meta));
}

}  // namespace collx
