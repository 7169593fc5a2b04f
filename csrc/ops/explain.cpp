#include "explain.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "../protocol/cpu_layout.h"
#include "../protocol/names.h"
#include "../protocol/norm_plan.h"
#include "../protocol/uses.h"
#include "call.h"
#include "checks.h"
#include "communicator.h"
#include "fallback.h"
#include "norm.h"

namespace collx {

namespace {

Collective check_op(std::string_view op) {
  const Collective found = find_name<Collective>(kCollectiveNames, op).value_or(Collective::none);
  TORCH_CHECK_VALUE(has_tensors(found), "collx: op: got \"", op, "\"; accepted: ",
                    c10::Join(", ", names_where(kCollectives, [](const CollectiveRow& row) {
                                return has_tensors(row.collective);
                              })));
  return found;
}

/// Adds to a request the properties of tensors that are divided evenly.
void add_tensors(const char* what, uint64_t numel, at::ScalarType dtype, bool input_symmetric,
                 bool output_symmetric, std::string_view algorithm, Request& request) {
  const Collective collective = request.collective;
  const Geometry geometry{1, numel, c10::elementSize(dtype)};
  if (reduces(collective)) request.dtype = check_dtype(what, dtype);
  request.bytes = geometry.bytes();
  request.message = longest_message(collective, geometry, request.world);
  request.input_symmetric = request.input_multicast = input_symmetric;
  request.output_symmetric = request.output_multicast = output_symmetric;
  request.algorithm = check_algorithm(what, collective, algorithm);
}

/// Adds the options of a fused normalization.
NormRequest add_options(const char* what, const Request& request, uint64_t numel, uint64_t cols,
                        at::ScalarType dtype, const NormWishes& wishes) {
  const Collective collective = request.collective;
  TORCH_CHECK_TYPE(can_normalize(request.dtype), "collx.", what, ": dtype: got ",
                   name_of(request.dtype), "; accepted: float32, float16, bfloat16");
  TORCH_CHECK_VALUE(cols > 0, "collx.", what,
                    ": shape: got rows without elements; accepted: [..., cols] with 1 column or "
                    "more");
  TORCH_CHECK_VALUE(!wishes.keep_norm || is_quantized(collective), "collx.", name_of(collective),
                    ": keep_norm: got True; accepted: False, since the normalized tensor is its "
                    "result");
  const NormWishes usual;
  TORCH_CHECK_VALUE(is_quantized(collective) || (wishes.scale_mode == usual.scale_mode &&
                                                 wishes.quant_group_size == usual.quant_group_size),
                    "collx.", name_of(collective),
                    ": scale_mode, quant_group_size: accepted only by operators with scales");
  const Operator& op = functional_operator(collective, wishes.keep_norm ? "keep_norm" : "");
  Arguments a;
  a.fp8_dtype = "e4m3fn";
  a.rounding = wishes.rounding;
  a.scale_mode = wishes.scale_mode;
  a.quant_group_size = wishes.quant_group_size;
  const NormOptions options =
      check_norm_options(op, a, dtype, c10::SymInt(static_cast<int64_t>(cols)));
  return norm_request(request, options, op.planned(), numel / cols, cols);
}

/// Bytes of the slots or the staging memory for all rows at once.
uint64_t norm_workspace(const NormRequest& r, Algorithm named) {
  const Algorithm algorithm = sums_or_results(r, named);
  const AlgorithmRow& row = row_of(algorithm);
  const NormShape s = norm_shape(r, algorithm, 0);
  const uint64_t rows = rows_to_do(r.collective, algorithm, r.rows, r.world);
  const uint64_t passed = 2 * rows * s.steps * s.cluster * s.piece_tiles * kTileBytes;
  uint64_t bytes = 0;
  if (row.slots != SlotsFor::none) bytes += static_cast<uint64_t>(row.stages * r.world) * passed;
  if (uses_staging(r, algorithm)) bytes += 2 * r.bytes;
  if (stages_results(r, algorithm)) bytes += passed;
  return bytes;
}

uint64_t uses(uint64_t bytes, uint64_t capacity) {
  return capacity == 0 ? 1 : std::max<uint64_t>(1, ceil_div(bytes, capacity));
}

uint64_t cpu_chunks(const CpuLayout& layout, Algorithm algorithm, const Request& r) {
  return uses(r.bytes, has_kernels(algorithm) ? cpu_chunk_bytes(layout, algorithm, r.world)
                                              : fallback_chunk_bytes(r.world, r.dtype));
}

uint64_t cuda_chunks(const CudaLayout& layout, const Plan& plan, const Request& r) {
  const Algorithm algorithm = plan.algorithm;
  if (row_of(algorithm).by == By::group) {
    return uses(r.bytes, fallback_chunk_bytes(r.world, r.dtype));
  }
  uint64_t chunks = 1;
  const auto through = [&](uint64_t bytes, uint64_t capacity) {
    chunks = std::max(chunks, uses(bytes, capacity));
  };
  if (const SlotArea* slots = slots_of(layout, row_of(algorithm).slots)) {
    through(vectors_of(r, algorithm) * kVectorBytes, slots->source_bytes);
  }
  if (row_of(algorithm).lanes) {
    const uint32_t slot = layout.lanes.slot_bytes;
    const uint32_t most = plan.width > 0 ? largest_wide_chunk(r.collective, r.world, slot)
                                         : largest_chunk(r.collective, algorithm, slot);
    const int lanes = plan.blocks * std::max(plan.width, 1);
    chunks = LaneChunks(vectors_of(r, algorithm), lanes, most / kVectorBytes).count;
  }
  if (uses_staging(r, algorithm)) through(r.bytes, layout.staging_bytes);
  if (stages_results(r, algorithm)) {
    through(data_vectors(r, Share::part) * kVectorBytes, layout.result_bytes);
  }
  return chunks;
}

uint64_t chunks_of(const Communicator& communicator, const Plan& plan, const Request& r) {
  return communicator.on_cuda() ? cuda_chunks(communicator.cuda_layout(), plan, r)
                                : cpu_chunks(communicator.cpu_layout(), plan.algorithm, r);
}

}  // namespace

Explanation explain(const Communicator& communicator, std::string_view op, uint64_t numel,
                    uint64_t cols, at::ScalarType dtype, bool input_symmetric,
                    bool output_symmetric, std::string_view algorithm, int64_t max_blocks,
                    const NormWishes& wishes) {
  constexpr const char* kWhat = "explain";
  const Collective collective = check_op(op);
  Request request = request_of(
      communicator, {.collective = collective, .max_blocks = check_max_blocks(kWhat, max_blocks)});
  add_tensors(kWhat, numel, dtype, input_symmetric, output_symmetric, algorithm, request);

  if (is_norm(collective)) {
    const NormRequest r = add_options(kWhat, request, numel, cols, dtype, wishes);
    check_requirements(name_of(collective).data(), r, communicator);
    const NormPlan p = plan_call(communicator, r);
    const uint64_t rows = rows_to_do(collective, p.plan.algorithm, r.rows, r.world);
    const uint64_t chunks =
        communicator.on_cuda()
            ? ceil_div<uint64_t>(rows, std::max(p.shape.rows_per_use, 1u)) * p.shape.steps
            : chunks_of(communicator, p.plan, r);
    return {p.plan, std::max<uint64_t>(chunks, 1), r.bytes, norm_workspace(r, p.plan.algorithm),
            nullptr};
  }

  TORCH_CHECK_VALUE(wishes == NormWishes(),
                    "collx.explain: rounding, scale_mode, quant_group_size, keep_norm: got a value "
                    "for ",
                    op, "; accepted: only for fused normalizations");
  check_requirements(kWhat, request, communicator);
  const Plan plan = plan_call(communicator, request);
  return {plan, chunks_of(communicator, plan, request), request.bytes,
          workspace_bytes(request, plan.algorithm), communicator.tuning().find(request)};
}

uint64_t workspace_bytes(std::string_view op, uint64_t numel, uint64_t cols, at::ScalarType dtype,
                         int world_size, std::string_view algorithm, bool symmetric) {
  constexpr const char* kWhat = "workspace_bytes";
  const Collective collective = check_op(op);
  TORCH_CHECK_VALUE(world_size >= 1 && world_size <= kMaxRanks,
                    "collx.workspace_bytes: ", "world_size: got ", world_size, "; accepted: 1 to ",
                    kMaxRanks);
  Request request;
  request.collective = collective;
  request.world = world_size;
  add_tensors(kWhat, numel, dtype, symmetric, symmetric, algorithm, request);
  uint64_t most = 0;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    request.device = device;
    if (is_norm(collective)) {
      const NormRequest r = add_options(kWhat, request, numel, cols, dtype, {});
      most = std::max(most, norm_workspace(r, select_algorithm(r)));
    } else {
      most = std::max(most, workspace_bytes(request, select(request).algorithm));
    }
  }
  return most;
}

}  // namespace collx
