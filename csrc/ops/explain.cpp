#include "explain.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

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
  std::string known;
  for (const CollectiveRow& row : kCollectives) {
    if (!has_tensors(row.collective)) continue;
    known.append(known.empty() ? "" : ", ").append(row.name);
  }
  TORCH_CHECK_VALUE(has_tensors(found), "collx: op: got \"", op, "\"; accepted: ", known);
  return found;
}

/// Bytes of the longest message between two ranks, for tensors that are divided evenly.
uint64_t message_of(Collective op, uint64_t bytes, int world) {
  return sends_all(op) ? bytes : ceil_div(bytes, static_cast<uint64_t>(world));
}

/// Copies take any dtype, of which only the size matters.
uint64_t itemsize_of(Collective op, at::ScalarType dtype, const char* what) {
  if (is_reduction(op)) return static_cast<uint64_t>(dtype_size(check_dtype(what, dtype)));
  return c10::elementSize(dtype);
}

/// A fused normalization with the options that it has by default.
NormRequest default_norm(const char* what, Collective op, const Request& request, uint64_t numel,
                         uint64_t cols, at::ScalarType dtype) {
  NormRequest r;
  static_cast<Request&>(r) = request;
  r.dtype = check_dtype(what, dtype);
  TORCH_CHECK_TYPE(can_normalize(r.dtype), "collx.", what, ": dtype: got ", name_of(r.dtype),
                   "; accepted: float32, float16, bfloat16");
  TORCH_CHECK_VALUE(cols > 0, "collx.", what,
                    ": shape: got rows of no element; accepted: [..., "
                    "cols], from 1 column");
  r.cols = cols;
  r.rows = numel / cols;
  const Quantized quantized = row_of(op).quantized;
  r.options.quantization = quantized == Quantized::fp8    ? Quantization::e4m3fn
                           : quantized == Quantized::int8 ? Quantization::int8
                                                          : Quantization::none;
  r.results = functional_operator(op).planned();
  return r;
}

const Operator& norm_operator(Collective collective, bool keeps_norm) {
  TORCH_CHECK_VALUE(!keeps_norm || is_quantized(collective), "collx.", name_of(collective),
                    ": keep_norm: got True; accepted: False, since the normalized tensor is its "
                    "result");
  return functional_operator(collective, keeps_norm ? "keep_norm" : "");
}

/// The request that a call makes, from tensors that have nothing but shape and dtype.
NormRequest request_as_called(const Communicator& communicator, Collective collective,
                              const Request& request, uint64_t numel, uint64_t cols,
                              at::ScalarType dtype, std::string_view algorithm,
                              const NormWishes& wishes) {
  const Operator& op = norm_operator(collective, wishes.keep_norm);
  const uint64_t rows = cols == 0 ? 0 : numel / cols;
  const auto meta = [&](at::IntArrayRef sizes, at::ScalarType type) {
    return at::empty(sizes, at::TensorOptions(type).device(at::kMeta));
  };
  const auto width = static_cast<int64_t>(cols);
  const auto& options = communicator.options();
  const uint64_t own =
      scatters_rows(collective) ? partition(rows, options.world_size, options.rank).count : rows;
  Arguments a;
  a.collective = collective;
  a.input = meta({static_cast<int64_t>(rows), width}, dtype);
  a.weight = meta({width}, dtype);
  a.group_name = options.name;
  a.fp8_dtype = "e4m3fn";
  a.rounding = wishes.rounding;
  a.algorithm = algorithm;
  a.max_blocks = request.max_blocks;
  for (const Argument argument : op.arguments) {
    if (argument == Argument::residual) {
      a.residual = meta({static_cast<int64_t>(own), width}, dtype);
    } else if (argument == Argument::bias) {
      a.bias = meta({width}, dtype);
    }
  }
  if (is_quantized(collective)) {
    a.scale_mode = wishes.scale_mode;
    a.quant_group_size = wishes.quant_group_size;
    if (a.scale_mode == "tensor") a.scale = meta({1}, at::kFloat);
  } else {
    TORCH_CHECK_VALUE(wishes.scale_mode == NormWishes().scale_mode &&
                          wishes.quant_group_size == NormWishes().quant_group_size,
                      "collx.", op.name,
                      ": scale_mode, quant_group_size: given to an operator without scales");
  }
  const NormCheck check = check_norm(op, a);
  NormRequest called = norm_request(communicator, check, check.options, op.planned(), rows, cols);
  called.input_symmetric = request.input_symmetric;
  called.input_multicast = request.input_multicast;
  check_multicast(op.name.c_str(), called, communicator);
  return called;
}

/// Of the slots or the staging memory, for all rows at once.
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
  return uses(r.bytes, row_of(algorithm).kernels ? cpu_chunk_bytes(layout, algorithm, r.world)
                                                 : fallback_chunk_bytes(r.world, r.dtype));
}

uint64_t cuda_chunks(const CudaLayout& layout, const Plan& plan, const Request& r) {
  const Algorithm algorithm = plan.algorithm;
  if (!row_of(algorithm).kernels) {
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
    const uint32_t most = largest_chunk(r.collective, layout.lanes.slot_bytes) / kVectorBytes;
    chunks = LaneChunks(vectors_of(r, algorithm), plan.blocks, most).count;
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
  const Collective collective = check_op(op);
  Request request =
      request_of(communicator,
                 {.collective = collective, .max_blocks = check_max_blocks("explain", max_blocks)});
  const uint64_t itemsize = itemsize_of(collective, dtype, "explain");
  if (is_reduction(collective)) request.dtype = check_dtype("explain", dtype);
  request.bytes = numel * itemsize;
  request.message = message_of(collective, request.bytes, request.world);
  request.input_symmetric = request.input_multicast = input_symmetric;
  request.output_symmetric = request.output_multicast = output_symmetric;
  request.algorithm = check_algorithm("explain", collective, algorithm);
  if (!is_norm(collective)) check_multicast("explain", request, communicator);
  if (collective == Collective::allreduce) {
    check_symmetric("explain", request.algorithm, input_symmetric, output_symmetric);
  } else {
    check_direct("explain", collective, request.algorithm, input_symmetric, output_symmetric,
                 false);
  }
  if (request.world > 1) check_peer_access("explain", request.algorithm, communicator);

  if (is_norm(collective)) {
    const NormRequest r =
        request_as_called(communicator, collective, request, numel, cols, dtype, algorithm, wishes);
    const NormPlan p = plan_norm(r, communicator.cuda_layout());
    const uint64_t rows = rows_to_do(collective, p.plan.algorithm, r.rows, r.world);
    const uint64_t chunks =
        communicator.on_cuda()
            ? ceil_div<uint64_t>(rows, std::max(p.shape.rows_per_use, 1u)) * p.shape.steps
            : chunks_of(communicator, p.plan, r);
    return {p.plan, std::max<uint64_t>(chunks, 1), r.bytes, norm_workspace(r, p.plan.algorithm)};
  }

  TORCH_CHECK_VALUE(wishes == NormWishes(),
                    "collx.explain: rounding, scale_mode, quant_group_size, ",
                    "keep_norm: given for ", op, ", which has none of them");
  const Plan plan = communicator.tuned(select(request));
  return {plan, chunks_of(communicator, plan, request), request.bytes,
          workspace_bytes(request, plan.algorithm)};
}

uint64_t workspace_bytes(std::string_view op, uint64_t numel, uint64_t cols, at::ScalarType dtype,
                         int world_size, std::string_view algorithm, bool symmetric) {
  const Collective collective = check_op(op);
  TORCH_CHECK_VALUE(world_size >= 1 && world_size <= kMaxRanks,
                    "collx.workspace_bytes: ", "world_size: got ", world_size, "; accepted: 1 to ",
                    kMaxRanks);
  Request request;
  request.collective = collective;
  if (is_reduction(collective)) request.dtype = check_dtype("workspace_bytes", dtype);
  request.bytes = numel * itemsize_of(collective, dtype, "workspace_bytes");
  request.message = message_of(collective, request.bytes, world_size);
  request.world = world_size;
  request.input_symmetric = request.output_symmetric = symmetric;
  request.input_multicast = request.output_multicast = symmetric;
  request.algorithm = check_algorithm("workspace_bytes", collective, algorithm);
  if (is_norm(collective)) {
    NormRequest r = default_norm("workspace_bytes", collective, request, numel, cols, dtype);
    uint64_t most = 0;
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
      r.device = device;
      most = std::max(most, norm_workspace(r, select_algorithm(r)));
    }
    return most;
  }
  uint64_t most = 0;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    request.device = device;
    most = std::max(most, workspace_bytes(request, select(request).algorithm));
  }
  return most;
}

}  // namespace collx
