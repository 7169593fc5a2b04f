// Launchers of the fused normalizations.
#include <algorithm>
#include <bit>

#include "../protocol/partition.h"
#include "collectives/kernel_table.cuh"
#include "kernels.h"
#include "launch.h"
#include "norm.h"
#include "stages/norm_arguments.cuh"

namespace collx::cuda {
namespace {

/// `rows`: that the grid goes through.
NormArguments norm_arguments_of(const NormCall& call, int world, uint64_t rows) {
  NormArguments a{};
  a.parts = Partition(call.rows, world);
  a.rows = rows;
  a.full_uses = static_cast<uint32_t>(rows / std::max(call.shape.rows_per_use, 1u));
  a.last_use = static_cast<uint32_t>(rows % std::max(call.shape.rows_per_use, 1u));
  a.result_rows = call.rows;
  a.residual = call.residual;
  a.weight = call.weight;
  a.bias = call.bias;
  a.residual_out = call.residual_out;
  a.normalized = call.normalized;
  a.quantized = call.quantized;
  a.scale = call.scale;
  a.cols = call.cols;
  a.vectors = static_cast<uint32_t>(
      ceil_div<uint64_t>(call.cols * static_cast<uint64_t>(dtype_size(call.dtype)), kVectorBytes));
  a.shape = call.shape;
  a.cluster_bits = static_cast<uint32_t>(std::countr_zero(call.shape.cluster));
  a.options = call.options;
  a.given_scale = call.given_scale;
  a.spill = call.spill;
  return a;
}

/// Whether the call is one of those that NormStage calls simple. Ranks may differ in it: it changes
/// the code that runs, not what is exchanged.
bool is_simple(const CudaView& view, const NormCall& call) {
  const auto whole = [](const void* tensor) { return tensor == nullptr || whole_vectors(tensor); };
  const NormOptions& o = call.options;
  const bool aligned = whole(call.input) && whole(call.residual) && whole(call.weight) &&
                       whole(call.residual_out) && whole(call.normalized) && whole(call.quantized);
  return !view.check && aligned && call.shape.steps == 1 && !call.scatters() &&
         call.cols * static_cast<uint64_t>(dtype_size(call.dtype)) % kVectorBytes == 0 &&
         o.norm == Norm::rms && o.weight_float32 == (call.dtype == DType::float32) &&
         (call.quantized == nullptr || o.scale_mode != ScaleMode::group);
}

}  // namespace

void norm(const CudaView& view, const NormCall& call, Stream stream) {
  KernelCall kernel_call = arguments_of(view, call);
  NormArguments norm = norm_arguments_of(
      call, view.world, rows_to_do(call.collective, call.plan.algorithm, call.rows, view.world));
  norm.scatters = call.scatters();
  if (norm.scatters) norm.result_rows = norm.parts.part(view.rank).count;
  PullArguments pull;
  const bool push = pushes_into_slots(call.plan.algorithm);
  if (push) {
    const bool large =
        row_of(call.plan.algorithm).slots == SlotsFor::twoshot || call.shape.large_slots;
    use_slots(kernel_call, large ? view.layout.twoshot : view.layout.oneshot, view, 0);
  } else {
    pull = pull_arguments_of(view, call);
  }
  if (view.check || !push) kernel_call.fingerprint = fingerprint(call.descriptor);
  void* arguments[] = {&kernel_call, &norm, &pull};  // a kernel takes as many as it has
  const Kernel kernel = require_kernel(call.collective, call.plan.algorithm, call.dtype, view.world,
                                       is_simple(view, call));
  launch(kernel, call.plan, view.pdl, arguments, stream, "launching a fused normalization",
         call.shape.cluster);
}

void normalize(const void* const* inputs, int world, const NormCall& call, Stream stream) {
  GatheredRows gathered{};
  std::copy_n(inputs, world, gathered.input);
  gathered.world = world;
  NormArguments norm = norm_arguments_of(call, 1, call.rows);
  void* arguments[] = {&gathered, &norm};
  launch(norm_local({call.dtype, 1, false}), call.plan, PdlLevel::off, arguments, stream,
         "launching a local normalization", call.shape.cluster);
}

}  // namespace collx::cuda
