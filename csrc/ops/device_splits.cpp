// alltoallv with splits in device memory.
#include <ATen/ops/empty.h>

#include "call.h"
#include "checks.h"
#include "collectives.h"

namespace collx {

namespace {

Prepared prepare_device_splits(const Arguments& a) {
  Prepared p = prepare(a);
  p.sizes = device_splits_sizes(a);
  const CommunicatorOptions& o = p.communicator->options();
  TORCH_CHECK_VALUE(a.device_splits.size(0) == o.world_size, "collx.", a.op(),
                    ": input_splits: got ", a.device_splits.size(0),
                    " numbers; accepted: one for each rank of \"", o.name, "\", ", o.world_size);
  p.exchange.axis = 0;
  p.exchange.geometry = rows_of(a.input);
  return p;
}

/// `out` and `received` are contiguous. `copies` are the copies from them that follow the call.
void carry_out(Prepared& p, const at::Tensor& splits, const at::Tensor& out,
               const at::Tensor& received, std::vector<std::pair<at::Tensor, at::Tensor>> copies) {
  const at::Tensor dense = *splits.expect_contiguous();
  p.exchange.splits = {static_cast<const int64_t*>(dense.const_data_ptr()),
                       static_cast<int64_t*>(received.mutable_data_ptr()),
                       p.exchange.geometry.inner, static_cast<uint64_t>(p.input.size(0)),
                       static_cast<uint64_t>(out.size(0))};
  auto more = std::make_shared<MoreOperands>();
  more->copies = std::move(copies);
  more->kept = {dense, received};
  run(p.exchange, *p.communicator, *p.input.expect_contiguous(), out, std::move(more));
}

void check_outputs(const Arguments& a, const Sizes& sizes) {
  check_out(a.op(), a.input, sizes, a.results[0]);
  check_out(a.op(), a.device_splits, a.device_splits.sym_sizes(), a.results[1], "output_splits");
}

}  // namespace

Results exchange_device_splits(const Operator& op, const Arguments& a) {
  Prepared p = prepare_device_splits(a);
  if (op.takes_outputs()) {
    check_outputs(a, p.sizes);
    check_disjoint(a.op(), a.input, a.results[0], std::nullopt);
    check_disjoint(a.op(), a.device_splits, a.results[0], std::nullopt, "out", "device_splits");
    const auto check_splits = [&](const at::Tensor& tensor, const char* name) {
      check_disjoint(a.op(), tensor, a.results[1], std::nullopt, "output_splits", name);
    };
    check_splits(a.input, "the input");
    check_splits(a.device_splits, "device_splits");
    check_splits(a.results[0], "out");
  }
  const auto dense = [&](size_t result) {
    return op.takes_outputs() && a.results[result].is_contiguous();
  };
  Results results{dense(0) ? a.results[0] : make_output(p.output_sizes(), a.input),
                  dense(1) ? a.results[1] : make_output(a.device_splits.sizes(), a.device_splits)};
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (size_t i = 0; i < results.size(); ++i) {
    if (op.takes_outputs() && !dense(i)) copies.emplace_back(results[i], a.results[i]);
  }
  carry_out(p, a.device_splits, results[0], results[1], std::move(copies));
  if (op.takes_outputs()) return {};
  return results;
}

Results exchange_device_splits_meta(const Operator& op, const Arguments& a) {
  check_core(a);
  const Sizes sizes = device_splits_sizes(a);
  if (op.takes_outputs()) {
    check_outputs(a, sizes);
    return {};
  }
  return {at::empty_symint(sizes, a.input.options()),
          at::empty_symint(a.device_splits.sym_sizes(), a.device_splits.options())};
}

}  // namespace collx
