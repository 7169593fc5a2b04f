#include "calls.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace collx::distributed {

namespace {

using Tensors = std::vector<at::Tensor>;

std::string_view name_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM: return "sum";
    case c10d::ReduceOp::AVG: return "avg";
    case c10d::ReduceOp::PRODUCT: return "prod";
    case c10d::ReduceOp::MIN: return "min";
    case c10d::ReduceOp::MAX: return "max";
    default: return {};
  }
}

/// The operation for values that are 0 or 1.
std::string_view name_for_bool(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::MAX:
    case c10d::ReduceOp::BOR: return "max";
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::BAND: return "min";
    default: return {};
  }
}

bool reduces(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kDouble:
    case at::kInt:
    case at::kLong:
    case at::kChar:
    case at::kByte: return true;
    default: return false;
  }
}

/// The number of elements in one row, which is also defined for a tensor with 0 rows.
int64_t row_numel(const at::Tensor& tensor) {
  return std::accumulate(tensor.sizes().begin() + 1, tensor.sizes().end(), int64_t{1},
                         std::multiplies<>());
}

/// The input, or a copy of it if it shares memory with the output, which the operators refuse. In
/// torch.distributed, root's own tensor may be one of its list.
at::Tensor apart(const at::Tensor& input, const at::Tensor& output) {
  return at::get_overlap_status(input, output) == at::MemOverlapStatus::No ? input : input.clone();
}

/// Checks the tensors of the list on root, whose elements the operators see as one flat tensor.
void check_list(const char* op, const Tensors& list, const char* other, int64_t numel) {
  for (const at::Tensor& tensor : list) {
    TORCH_CHECK_VALUE(tensor.numel() == numel, "collx: ", op, ": ", op,
                      "_list: got a tensor of shape ", tensor.sizes(),
                      "; accepted: as many elements as the ", other, " has, ", numel);
  }
}

std::vector<int64_t> numels(const Tensors& tensors) {
  std::vector<int64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

}  // namespace

std::optional<Reduction> reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_conj()) return std::nullopt;
  const at::ScalarType type = tensor.scalar_type();
  Reduction reduction;
  if (type == at::kBool) {
    reduction = {tensor.view(at::kByte), name_for_bool(op)};
  } else if (at::isComplexType(type) && (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG)) {
    reduction = {at::view_as_real(tensor), name_of(op)};
  } else {
    reduction = {tensor, name_of(op)};
  }
  if (reduction.op.empty() || !reduces(reduction.tensor.scalar_type())) return std::nullopt;
  const bool floating = at::isFloatingType(reduction.tensor.scalar_type());
  if (op == c10d::ReduceOp::AVG && !floating) return std::nullopt;
  return reduction;
}

at::Tensor flat(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "collx: ", op, ": ", argument,
                    ": got a tensor that is not contiguous; accepted: a contiguous one");
  return tensor.view({-1});
}

namespace {

/// The reduction of an input for the output `to`.
Reduction reduction_for(const Reduction& to, const c10d::ReduceOp& op, const at::Tensor& input) {
  auto from = reduction_of(op, input);
  TORCH_CHECK_VALUE(from, "collx: reduce_scatter: output: got dtype ", to.tensor.scalar_type(),
                    "; accepted: the input's, ", input.scalar_type());
  return *std::move(from);
}

bool same_sizes(const Tensors& tensors) {
  return std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
    return tensor.numel() == tensors[0].numel() && tensor.scalar_type() == tensors[0].scalar_type();
  });
}

/// The memory of the tensors as one flat tensor, if they are dense, have equal sizes, and are
/// adjacent in one storage.
std::optional<at::Tensor> as_one(const Tensors& tensors) {
  const at::Tensor& first = tensors[0];
  if (!same_sizes(tensors) || !first.is_contiguous()) return std::nullopt;
  const int64_t numel = first.numel();
  for (size_t i = 1; i < tensors.size(); ++i) {
    const at::Tensor& next = tensors[i];
    if (!next.is_contiguous() || !next.is_alias_of(first) ||
        next.storage_offset() != first.storage_offset() + static_cast<int64_t>(i) * numel) {
      return std::nullopt;
    }
  }
  return first.as_strided({static_cast<int64_t>(tensors.size()) * numel}, {1},
                          first.storage_offset());
}

/// The values of the tensors in one flat tensor, which is a copy unless as_one() succeeds.
at::Tensor flattened(const Tensors& tensors) {
  if (auto one = as_one(tensors)) return *std::move(one);
  Tensors rows;
  for (const at::Tensor& tensor : tensors) rows.push_back(tensor.reshape({-1}));
  return at::cat(rows);
}

}  // namespace

Calls::Target Calls::target_of(const Tensors& outputs) {
  if (auto one = as_one(outputs)) return {*std::move(one), {}};
  const std::vector<int64_t> counts = numels(outputs);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  at::Tensor flat = at::empty({total}, outputs[0].options());
  auto then = [flat, counts, outputs] {
    const Tensors parts = flat.split_with_sizes(counts);
    for (size_t i = 0; i < outputs.size(); ++i) {
      at::Tensor output = outputs[i];
      output.copy_(parts[i].view(output.sizes()));
    }
  };
  return {flat, std::move(then)};
}

void Calls::allgather(const at::Tensor& input, const at::Tensor& output) {
  at::Tensor to = flat("all_gather", "output", output);
  (*this)([&] { operators::allgather(input.reshape({-1}), world, name, to); });
}

void Calls::allgather(const at::Tensor& input, const Tensors& outputs) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(world),
                    "collx: all_gather: tensor_list: got ", outputs.size(),
                    " tensors; accepted: one for each of ", world, " ranks");
  if (same_sizes(outputs)) {
    Target target = target_of(outputs);
    return (*this)([&] { operators::allgather(input.reshape({-1}), world, name, target.flat); },
                   target.then);
  }
  // The tensors have different sizes: every rank broadcasts its own.
  for (int root = 0; root < world; ++root) {
    at::Tensor part = outputs[static_cast<size_t>(root)];
    (*this)([&] {
      if (root == rank) part.copy_(input.reshape(part.sizes()));
      operators::broadcast_(part, root, name);
    });
  }
}

void Calls::reducescatter(const at::Tensor& input, const Reduction& to, const c10d::ReduceOp& op) {
  const at::Tensor in = flat("reduce_scatter", "input", reduction_for(to, op, input).tensor);
  at::Tensor out = flat("reduce_scatter", "output", to.tensor);
  // The operator accepts parts of unequal sizes, so it would refuse the output on some ranks only.
  TORCH_CHECK_VALUE(in.numel() == world * out.numel(), "collx: reduce_scatter: input: got shape ",
                    input.sizes(), "; accepted: ", world,
                    " times as many elements as the output has");
  (*this)([&] { operators::reducescatter(in, to.op, world, name, out); });
}

void Calls::reducescatter(const Tensors& inputs, const at::Tensor& output, const Reduction& to,
                          const c10d::ReduceOp& op) {
  TORCH_CHECK_VALUE(inputs.size() == static_cast<size_t>(world),
                    "collx: reduce_scatter: input_list: got ", inputs.size(),
                    " tensors; accepted: one for each of ", world, " ranks");
  if (same_sizes(inputs)) {
    if (output.is_contiguous()) return reducescatter(flattened(inputs), to, op);
    const at::Tensor from = reduction_for(to, op, flattened(inputs)).tensor.view({-1});
    const at::Tensor dense = at::empty_like(to.tensor, at::MemoryFormat::Contiguous);
    at::Tensor out = dense.view({-1});
    return (*this)([&] { operators::reducescatter(from, to.op, world, name, out); },
                   [dense, result = to.tensor] { result.copy_(dense); });
  }
  for (int root = 0; root < world; ++root) {
    const at::Tensor part = inputs[static_cast<size_t>(root)].clone();
    Reduction reduction = reduction_for(to, op, part);
    std::function<void()> then;
    if (root == rank) then = [part, output] { output.copy_(part.view(output.sizes())); };
    (*this)([&] { operators::reduce_(reduction.tensor, reduction.op, root, name); }, then);
  }
}

void Calls::alltoall(const at::Tensor& input, const at::Tensor& output,
                     std::vector<int64_t> input_splits, std::vector<int64_t> output_splits) {
  at::Tensor to = flat("all_to_all", "output", output);
  const at::Tensor from = flat("all_to_all", "input", input);
  const auto ranks = static_cast<size_t>(world);
  const auto check = [&](const at::Tensor& tensor, const char* argument,
                         const std::vector<int64_t>& splits) {
    TORCH_CHECK_VALUE(tensor.dim() > 0, "collx: all_to_all: ", argument,
                      ": got a tensor without dimensions; accepted: one with rows");
    if (splits.empty()) {
      TORCH_CHECK_VALUE(tensor.size(0) % world == 0, "collx: all_to_all: ", argument, ": got ",
                        tensor.size(0), " rows; accepted: a multiple of the group size, ", world);
    } else {
      TORCH_CHECK_VALUE(
          splits.size() == ranks &&
              std::accumulate(splits.begin(), splits.end(), int64_t{0}) == tensor.size(0),
          "collx: all_to_all: ", argument, "_split_sizes: got ", splits, "; accepted: ", world,
          " numbers that add up to ", tensor.size(0), ", the rows of ", argument);
    }
  };
  check(input, "input", input_splits);
  check(output, "output", output_splits);
  if (input_splits.empty() && output_splits.empty()) {
    return (*this)([&] { operators::alltoall(from, world, name, to); });
  }
  if (input_splits.empty()) input_splits.assign(ranks, input.size(0) / world);
  if (output_splits.empty()) output_splits.assign(ranks, output.size(0) / world);
  for (int64_t& rows : input_splits) rows *= row_numel(input);
  for (int64_t& rows : output_splits) rows *= row_numel(output);
  (*this)([&] { operators::alltoallv(from, output_splits, input_splits, name, to); });
}

void Calls::alltoall(const Tensors& inputs, const Tensors& outputs) {
  Target target = target_of(outputs);
  const at::Tensor from = flattened(inputs);
  (*this)([&] { operators::alltoallv(from, numels(outputs), numels(inputs), name, target.flat); },
          target.then);
}

void Calls::gather(const at::Tensor& input, const Tensors& outputs, int64_t root) {
  TORCH_CHECK_VALUE(outputs.size() == (root == rank ? static_cast<size_t>(world) : 0),
                    "collx: gather: gather_list: got ", outputs.size(),
                    " tensors; accepted: one for each of ", world, " ranks on root, else none");
  check_list("gather", outputs, "input", input.numel());
  at::Tensor from = input.reshape({-1});
  if (root != rank) {
    at::Tensor nothing = at::empty({from.numel() * world}, from.options());
    return (*this)([&] { operators::gather(from, root, world, name, nothing); });
  }
  Target target = target_of(outputs);
  from = apart(from, target.flat);
  (*this)([&] { operators::gather(from, root, world, name, target.flat); }, target.then);
}

void Calls::gather(const at::Tensor& input, const at::Tensor& output, int64_t root) {
  if (root != rank) return gather(input, Tensors{}, root);
  at::Tensor to = flat("gather", "output", output);
  const at::Tensor from = apart(input.reshape({-1}), to);
  (*this)([&] { operators::gather(from, root, world, name, to); });
}

void Calls::scatter(const Tensors& inputs, const at::Tensor& output, int64_t root) {
  TORCH_CHECK_VALUE(inputs.size() == (root == rank ? static_cast<size_t>(world) : 0),
                    "collx: scatter: scatter_list: got ", inputs.size(),
                    " tensors; accepted: one for each of ", world, " ranks on root, else none");
  check_list("scatter", inputs, "output", output.numel());
  Target target = target_of({output});
  // Only root's values are read.
  const at::Tensor from = root == rank ? apart(flattened(inputs), target.flat)
                                       : at::empty({output.numel() * world}, output.options());
  (*this)([&] { operators::scatter(from, root, world, name, target.flat); }, target.then);
}

}  // namespace collx::distributed
