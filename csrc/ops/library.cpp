// The library of operators: their schemas, and the kernels below autograd.
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

#include "collectives.h"
#include "norm.h"
#include "shared_kernels.h"

namespace collx {

namespace {

using Function = Results (*)(const Operator& op, const Arguments& arguments);

/// No rank waits during tracing.
Results barrier_meta(const Operator& /*op*/, const Arguments& /*arguments*/) { return {}; }

struct FamilyRow {
  Family family;
  Function call;
  Function meta;
  bool needs_contiguous_strides;  // Inductor must not choose another layout for the arguments
};

constexpr FamilyRow kFamilies[] = {
    {Family::exchange, exchange, exchange_meta, true},
    {Family::map, reduce_and_map, reduce_and_map_meta, false},
    {Family::device_splits, exchange_device_splits, exchange_device_splits_meta, true},
    {Family::norm, norm, norm_meta, true},
    {Family::epilogue, apply_epilogue, apply_epilogue_meta, false},
    {Family::barrier, barrier, barrier_meta, false},
};
static_assert(stand_at_their_values(kFamilies, &FamilyRow::family));

const FamilyRow& row_of(Family family) { return kFamilies[static_cast<size_t>(family)]; }

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const Operator& op, Function function) : op_(op), function_(function) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Results results = function_(op_, Arguments(op_, *stack));
    torch::jit::drop(*stack, op_.stack_size());
    if (op_.form != Form::functional) return;
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }

 private:
  const Operator& op_;
  Function function_;
};

torch::CppFunction kernel(const Operator& op, Function function) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op, function));
}

std::vector<at::Tag> tags_of(const Operator& op) {
  std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  if (row_of(op.family).needs_contiguous_strides) {
    tags.push_back(at::Tag::needs_contiguous_strides);
  }
  if (op.takes_outputs()) tags.push_back(at::Tag::out_variant);
  return tags;
}

/// Unsupported layouts get the same kernels, whose checks report what is accepted. Without a
/// kernel, the dispatcher's own message would name neither the argument nor a remedy.
constexpr c10::DispatchKey kTensorKeys[] = {
    c10::DispatchKey::CPU,          c10::DispatchKey::CUDA,
    c10::DispatchKey::SparseCPU,    c10::DispatchKey::SparseCUDA,
    c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::SparseCsrCUDA,
    c10::DispatchKey::QuantizedCPU, c10::DispatchKey::QuantizedCUDA,
    c10::DispatchKey::MkldnnCPU,
};
/// Without a tensor, the communicator determines the device.
constexpr c10::DispatchKey kNoTensorKeys[] = {c10::DispatchKey::CompositeExplicitAutograd};

}  // namespace

TORCH_LIBRARY(collx, library) {
  for (const Operator& op : operators()) {
    const std::vector<at::Tag> tags = tags_of(op);
    library.def(op.schema().c_str(), tags);
    const FamilyRow& row = row_of(op.family);
    const std::string name = op.full_name();
    const at::ArrayRef<c10::DispatchKey> keys = op.has_tensors()
                                                    ? at::ArrayRef<c10::DispatchKey>(kTensorKeys)
                                                    : at::ArrayRef<c10::DispatchKey>(kNoTensorKeys);
    for (const c10::DispatchKey key : keys) {
      library.impl(name.c_str(), torch::dispatch(key, kernel(op, row.call)));
    }
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, kernel(op, row.meta)));
  }
  add_shared_kernels(library);
}

}  // namespace collx
