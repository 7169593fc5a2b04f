#include "explain.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "../protocol/cpu_layout.h"
#include "../protocol/names.h"
#include "../protocol/selection.h"
#include "call.h"
#include "checks.h"
#include "communicator.h"
#include "fallback.h"

namespace collx {

namespace {

Collective check_op(std::string_view op) {
  const Collective found = find_name<Collective>(kCollectiveNames, op).value_or(Collective::none);
  const auto moves_data = [](Collective c) {
    return c != Collective::none && c != Collective::barrier && !is_norm(c);
  };
  std::string known;
  for (size_t i = 0; i < kCollectiveNames.size(); ++i) {
    if (!moves_data(static_cast<Collective>(i))) continue;
    known.append(known.empty() ? "" : ", ").append(kCollectiveNames[i]);
  }
  TORCH_CHECK_VALUE(moves_data(found), "collx: op: got \"",
                    op, "\"; accepted: ", known);
  return found;
}

/// Bytes of the longest message between two ranks, for tensors that are divided evenly.
uint64_t message_of(Collective op, uint64_t bytes, int world) {
  const bool whole = op == Collective::broadcast || op == Collective::reduce;
  return whole ? bytes : ceil_div(bytes, static_cast<uint64_t>(world));
}

/// Copies take any dtype, of which only the size matters.
uint64_t itemsize_of(Collective op, at::ScalarType dtype, const char* what) {
  if (is_reduction(op)) return static_cast<uint64_t>(dtype_size(check_dtype(what, dtype)));
  return c10::elementSize(dtype);
}

uint64_t uses(uint64_t bytes, uint64_t capacity) {
  return capacity == 0 ? 0 : std::max<uint64_t>(1, ceil_div(bytes, capacity));
}

uint64_t cpu_chunks(const RegionLayout& layout, Algorithm algorithm, DType dtype, uint64_t bytes,
                    int world) {
  const uint64_t chunk = algorithm == Algorithm::fallback
                             ? fallback_chunk_bytes(world, dtype)
                             : cpu_chunk_bytes(layout, algorithm, world);
  return chunk == 0 ? 1 : uses(bytes, chunk);
}

uint64_t cuda_chunks(const RegionLayout& layout, Algorithm algorithm, const Request& request) {
  const uint64_t bytes = request.bytes;
  const int world = request.world;
  const bool input_symmetric = request.input_symmetric;
  const DType dtype = request.dtype;
  const uint64_t part = ceil_div(bytes, static_cast<uint64_t>(world));
  const bool sentinel = has_sentinel(dtype);
  const bool masked = !is_reduction(request.collective) || !sentinel;
  const uint64_t wire = request.message + (masked ? request.message / 31 : 0);
  switch (algorithm) {
    case Algorithm::staged:
    case Algorithm::onestage:
      if (reduces_in_two_stages(request.collective, world, request.message)) {
        return uses(wire / (static_cast<uint64_t>(world) - 1), layout.twoshot.capacity());
      }
      return uses(wire, is_one_way(request.collective) ? layout.channels.slots.capacity()
                                                       : layout.twoshot.capacity());
    case Algorithm::pipelined:
      return uses(ceil_div<uint64_t>(wire, world > 1 ? static_cast<uint64_t>(world) - 1 : 1),
                  layout.twoshot.capacity());
    case Algorithm::twostage:
      return request.output_symmetric ? 1 : uses(part, layout.result_bytes);
    case Algorithm::oneshot_push:
      return uses(bytes, (sentinel ? layout.oneshot : layout.oneshot_pairs).capacity());
    case Algorithm::twoshot_push:
      return uses(part, (sentinel ? layout.twoshot : layout.twoshot_pairs).capacity());
    case Algorithm::oneshot_pull:
      return input_symmetric ? 1 : uses(bytes, layout.staging_bytes);
    case Algorithm::twoshot_pull:
      return std::max(uses(part, layout.result_bytes),
                      input_symmetric ? 1 : uses(bytes, layout.staging_bytes));
    case Algorithm::fallback:
      return uses(bytes, fallback_chunk_bytes(world, dtype));
    default:
      return 1;
  }
}

uint64_t workspace_of(const Request& request, Algorithm algorithm) {
  const bool messages = algorithm == Algorithm::staged || algorithm == Algorithm::onestage;
  return workspace_bytes(
      algorithm, request.dtype, messages ? request.message : request.bytes, request.world,
      algorithm == Algorithm::twostage ? request.output_symmetric : request.input_symmetric);
}

}  // namespace

Explanation explain(const Communicator& communicator, std::string_view op, uint64_t numel,
                    at::ScalarType dtype, bool input_symmetric, bool output_symmetric,
                    std::string_view algorithm, int64_t max_blocks) {
  const Collective collective = check_op(op);
  Request request = request_of(communicator, collective, check_max_blocks("explain", max_blocks));
  const uint64_t itemsize = itemsize_of(collective, dtype, "explain");
  if (is_reduction(collective)) request.dtype = check_dtype("explain", dtype);
  request.bytes = numel * itemsize;
  request.message = message_of(collective, request.bytes, request.world);
  request.input_symmetric = input_symmetric;
  request.output_symmetric = output_symmetric;
  request.algorithm = check_algorithm("explain", collective, algorithm);
  if (collective == Collective::allreduce) {
    check_symmetric("explain", request.algorithm, input_symmetric, output_symmetric);
  } else {
    check_direct("explain", collective, request.algorithm, input_symmetric, output_symmetric,
                 false);
  }
  if (request.world > 1) check_peer_access("explain", request.algorithm, communicator);

  const Plan plan = select(request);
  const RegionLayout layout = communicator.view().layout;
  return {plan,
          communicator.on_cuda()
              ? cuda_chunks(layout, plan.algorithm, request)
              : cpu_chunks(layout, plan.algorithm, request.dtype, request.bytes, request.world),
          request.bytes, workspace_of(request, plan.algorithm)};
}

uint64_t workspace_bytes(std::string_view op, uint64_t numel, at::ScalarType dtype, int world_size,
                         std::string_view algorithm, bool symmetric) {
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
  request.algorithm = check_algorithm("workspace_bytes", collective, algorithm);
  uint64_t most = 0;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    request.device = device;
    most = std::max(most, workspace_of(request, select_algorithm(request)));
  }
  return most;
}

}  // namespace collx
