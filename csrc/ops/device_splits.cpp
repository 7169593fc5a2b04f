// alltoallv whose splits lie in device memory: an operator of its own, with two results.
#include "device_splits.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "call.h"
#include "checks.h"
#include "collectives.h"

namespace collx {

namespace {

constexpr const char* kSplitsOp = row_of(Collective::alltoallv).name;

Given given_of(const at::Tensor& input, std::string_view group_name, std::string_view algorithm,
               int64_t max_blocks) {
  Given given{Collective::alltoallv, input};
  given.group_name = group_name;
  given.algorithm = algorithm;
  given.max_blocks = max_blocks;
  return given;
}

Prepared prepare_device_splits(const Given& given, const at::Tensor& input_splits,
                               int64_t capacity) {
  Prepared p = prepare(given);
  p.sizes = device_splits_sizes(kSplitsOp, given.input, input_splits, capacity);
  const CommunicatorOptions& o = p.communicator->options();
  TORCH_CHECK_VALUE(input_splits.size(0) == o.world_size, "collx.", kSplitsOp,
                    ": input_splits: got ", input_splits.size(0),
                    " numbers; accepted: one for each rank of \"", o.name, "\", ", o.world_size);
  p.exchange.axis = 0;
  p.exchange.geometry = rows_of(given.input);
  return p;
}

/// `out` and `received` are contiguous.
void run_device_splits(Prepared& p, const at::Tensor& input_splits, const at::Tensor& out,
                       const at::Tensor& received) {
  const auto splits = input_splits.expect_contiguous();
  p.exchange.splits = {static_cast<const int64_t*>(splits->const_data_ptr()),
                       static_cast<int64_t*>(received.mutable_data_ptr()),
                       p.exchange.geometry.inner, static_cast<uint64_t>(p.input.size(0)),
                       static_cast<uint64_t>(out.size(0))};
  run(p.exchange, *p.communicator, *p.input.expect_contiguous(), out);
}

std::tuple<at::Tensor, at::Tensor> new_by_splits(const at::Tensor& input,
                                                 const at::Tensor& input_splits, int64_t capacity,
                                                 std::string_view group_name,
                                                 std::string_view algorithm, int64_t max_blocks) {
  const Given given = given_of(input, group_name, algorithm, max_blocks);
  Prepared p = prepare_device_splits(given, input_splits, capacity);
  const OnDevice guard(input.device());
  at::Tensor out = make_output(p.output_sizes(), input);
  at::Tensor received = make_output(input_splits.sizes(), input_splits);
  run_device_splits(p, input_splits, out, received);
  return {std::move(out), std::move(received)};
}

void out_by_splits(const at::Tensor& input, const at::Tensor& input_splits, int64_t capacity,
                   std::string_view group_name, std::string_view algorithm, int64_t max_blocks,
                   at::Tensor& out, at::Tensor& output_splits) {
  const Given given = given_of(input, group_name, algorithm, max_blocks);
  Prepared p = prepare_device_splits(given, input_splits, capacity);
  check_out(kSplitsOp, input, p.sizes, out);
  check_disjoint(kSplitsOp, input, out, std::nullopt);
  check_out(kSplitsOp, input_splits, input_splits.sym_sizes(), output_splits, "output_splits");
  check_disjoint(kSplitsOp, input_splits, output_splits, std::nullopt, "output_splits");
  const OnDevice guard(input.device());
  const at::Tensor dense = out.is_contiguous() ? out : make_output(p.output_sizes(), input);
  const at::Tensor received = output_splits.is_contiguous()
                                  ? output_splits
                                  : make_output(input_splits.sizes(), input_splits);
  run_device_splits(p, input_splits, dense, received);
  if (!dense.is_same(out)) out.copy_(dense);
  if (!received.is_same(output_splits)) output_splits.copy_(received);
}

Sizes sizes_on_meta(const at::Tensor& input, const at::Tensor& input_splits,
                    const c10::SymInt& capacity, std::string_view algorithm, int64_t max_blocks) {
  check_copyable(kSplitsOp, "input", input);
  check_algorithm(kSplitsOp, Collective::alltoallv, algorithm);
  check_max_blocks(kSplitsOp, max_blocks);
  return device_splits_sizes(kSplitsOp, input, input_splits, capacity);
}

std::tuple<at::Tensor, at::Tensor> new_on_meta(const at::Tensor& input,
                                               const at::Tensor& input_splits, c10::SymInt capacity,
                                               std::string_view, std::string_view algorithm,
                                               int64_t max_blocks) {
  const Sizes sizes = sizes_on_meta(input, input_splits, capacity, algorithm, max_blocks);
  return {at::empty_symint(sizes, input.options()),
          at::empty_symint(input_splits.sym_sizes(), input_splits.options())};
}

void out_on_meta(const at::Tensor& input, const at::Tensor& input_splits, c10::SymInt capacity,
                 std::string_view, std::string_view algorithm, int64_t max_blocks, at::Tensor& out,
                 at::Tensor& output_splits) {
  check_out(kSplitsOp, input, sizes_on_meta(input, input_splits, capacity, algorithm, max_blocks),
            out);
  check_out(kSplitsOp, input_splits, input_splits.sym_sizes(), output_splits, "output_splits");
}

}  // namespace

void define_device_splits(torch::Library& library) {
  const std::string arguments =
      "(Tensor input, Tensor input_splits, SymInt capacity, " +
      argument::List<argument::GroupName, argument::Algorithm, argument::MaxBlocks>::schema();
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
  const std::vector<at::Tag> out_tags = {tags[0], tags[1], at::Tag::out_variant};
  library.def(("alltoallv.device_splits" + arguments + ") -> (Tensor, Tensor)").c_str(), tags);
  library.def(("alltoallv.device_splits_out" + arguments +
               ", *, Tensor(a!) out, Tensor(b!) output_splits) -> ()")
                  .c_str(),
              out_tags);
}

void add_device_splits_kernels(torch::Library& library, c10::DispatchKey key) {
  library.impl("alltoallv.device_splits", torch::dispatch(key, TORCH_FN(new_by_splits)));
  library.impl("alltoallv.device_splits_out", torch::dispatch(key, TORCH_FN(out_by_splits)));
}

TORCH_LIBRARY_IMPL(collx, Meta, library) {
  library.impl("alltoallv.device_splits", TORCH_FN(new_on_meta));
  library.impl("alltoallv.device_splits_out", TORCH_FN(out_on_meta));
}

}  // namespace collx
