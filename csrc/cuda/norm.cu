// Launchers of the fused normalizations.
#include <algorithm>
#include <bit>

#include "arguments/norm_arguments.cuh"
#include "calls.h"
#include "launch.h"

namespace collx::cuda {
namespace {

/// `rows`: the rows that the grid processes.
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
  a.first_row = call.first_row;
  a.spill = call.spill;
  return a;
}

/// Whether the call is simple: see NormStage. Ranks may differ in this: it selects the code that
/// runs, not the data that is exchanged.
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

using NormLaunch = Launch<NormCall>;

NormArguments norm_arguments_of(const NormLaunch& l) {
  const int world = l.view.world;
  NormArguments norm = norm_arguments_of(
      l.call, world, rows_to_do(l.call.collective, l.call.plan.algorithm, l.call.rows, world));
  norm.scatters = l.call.scatters();
  if (norm.scatters) norm.result_rows = norm.parts.part(l.view.rank).count;
  return norm;
}

void push(const NormLaunch& l) {
  KernelCall k = arguments_of(l.view, l.call);
  const CudaLayout& layout = l.view.layout;
  const SlotsFor slots =
      l.call.shape.large_slots ? SlotsFor::twoshot : row_of(l.call.plan.algorithm).slots;
  use_slots(k, *slots_of(layout, slots), l.view, 0);
  if (l.view.check) k.fingerprint = fingerprint(l.call.descriptor);
  NormArguments norm = norm_arguments_of(l);
  l.run(is_simple(l.view, l.call), k, norm);
}

void pull(const NormLaunch& l) {
  KernelCall k = arguments_of(l.view, l.call);
  k.fingerprint = fingerprint(l.call.descriptor);
  NormArguments norm = norm_arguments_of(l);
  PullArguments pull = pull_arguments_of(l.view, l.call);
  l.run(false, k, norm, pull);
}

void multimem(const NormLaunch& l) {
  KernelCall k = arguments_of(l.view, l.call);
  k.fingerprint = fingerprint(l.call.descriptor);
  NormArguments norm = norm_arguments_of(l);
  PullArguments pull = pull_arguments_of(l.view, l.call);
  MulticastArguments multicast = multicast_arguments_of(l.view, l.call);
  l.run(false, k, norm, pull, multicast);
}

constexpr Collectives kPushed = kNorms | kScatteringNorms;
constexpr LauncherRow<NormCall> kLaunchers[] = {
    {Algorithm::oneshot_push, kPushed, kernels::norm_oneshot_push, push},
    {Algorithm::twoshot_push, kNorms, kernels::norm_twoshot_push, push},
    {Algorithm::twoshot_push_sums, kNorms, kernels::norm_twoshot_push_sums, push},
    {Algorithm::oneshot_pull, kNorms, kernels::norm_oneshot_pull, pull},
    {Algorithm::twoshot_pull, kNorms, kernels::norm_twoshot_pull, pull},
    {Algorithm::multimem_twoshot, kNorms, kernels::norm_multimem_twoshot, multimem},
};
static_assert(take_epilogues(kLaunchers, kPushed, Algorithm::automatic));
static_assert(is_complete(DeviceKind::cuda, kNorms, [](Collective c, Algorithm a) {
  return find_launcher(kLaunchers, c, a) != nullptr;
}));
// plan_norm() always plans oneshot_push for these collectives.
static_assert(is_complete(DeviceKind::cuda, kScatteringNorms, [](Collective c, Algorithm) {
  return find_launcher(kLaunchers, c, Algorithm::oneshot_push) != nullptr;
}));

}  // namespace

void norm(const CudaView& view, const NormCall& call, Stream stream) {
  launch_by(kLaunchers, view, call, stream);
}

void normalize(const void* const* inputs, int world, const NormCall& call, Stream stream) {
  GatheredRows gathered{};
  std::copy_n(inputs, world, gathered.input);
  gathered.world = world;
  NormArguments norm = norm_arguments_of(call, 1, call.rows);
  const EpilogueCall* epilogue = call.epilogue;
  const Kernel kernel =
      epilogue == nullptr
          ? norm_local({call.dtype, 1, false})
          : find_with_epilogue(*epilogue,
                               {.kernel = kernels::norm_local.with_epilogue, .form = form_of(call)},
                               call.plan);
  if (kernel == nullptr) return;
  void* arguments[] = {&gathered, &norm, nullptr};
  if (epilogue != nullptr) arguments[2] = const_cast<EpilogueArguments*>(&epilogue->arguments);
  launch(kernel, call.plan, PdlLevel::off, arguments, stream, "a local normalization",
         call.shape.cluster);
}

}  // namespace collx::cuda
