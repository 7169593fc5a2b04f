#include "explain.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "../protocol/cpu_layout.h"
#include "../protocol/names.h"
#include "../protocol/selection.h"
#include "checks.h"
#include "communicator.h"
#include "fallback.h"

namespace collx {

namespace {

void check_op(std::string_view op) {
  const auto found = find_name<Collective>(kCollectiveNames, op);
  TORCH_CHECK_VALUE(found.value_or(Collective::none) != Collective::none, "collx: op: got \"", op,
                    "\"; accepted: allreduce");
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

uint64_t cuda_chunks(const RegionLayout& layout, Algorithm algorithm, DType dtype, uint64_t bytes,
                     int world, bool input_symmetric) {
  const uint64_t part = ceil_div(bytes, static_cast<uint64_t>(world));
  const bool sentinel = has_sentinel(dtype);
  switch (algorithm) {
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

}  // namespace

Explanation explain(const Communicator& communicator, std::string_view op, uint64_t numel,
                    at::ScalarType dtype, bool input_symmetric, bool output_symmetric,
                    std::string_view algorithm, int64_t max_blocks) {
  check_op(op);
  Request request;
  request.device = communicator.on_cuda() ? DeviceKind::cuda : DeviceKind::cpu;
  request.dtype = check_dtype("explain", dtype);
  request.bytes = numel * static_cast<uint64_t>(dtype_size(request.dtype));
  request.world = communicator.options().world_size;
  request.input_symmetric = input_symmetric;
  request.output_symmetric = output_symmetric;
  request.algorithm = check_algorithm("explain", algorithm);
  request.max_blocks = check_max_blocks("explain", max_blocks);
  request.room = communicator.options().blocks;
  request.capabilities.peer_access = communicator.has_regions();
  check_symmetric("explain", request.algorithm, input_symmetric, output_symmetric);
  if (request.world > 1) check_peer_access("explain", request.algorithm, communicator);

  const Plan plan = select(request);
  const RegionLayout layout = communicator.view().layout;
  return {plan,
          communicator.on_cuda()
              ? cuda_chunks(layout, plan.algorithm, request.dtype, request.bytes, request.world,
                            input_symmetric)
              : cpu_chunks(layout, plan.algorithm, request.dtype, request.bytes, request.world),
          request.bytes,
          workspace_bytes(plan.algorithm, request.dtype, request.bytes, request.world,
                          input_symmetric)};
}

uint64_t workspace_bytes(std::string_view op, uint64_t numel, at::ScalarType dtype, int world_size,
                         std::string_view algorithm, bool symmetric) {
  check_op(op);
  TORCH_CHECK_VALUE(world_size >= 1 && world_size <= kMaxRanks,
                    "collx.workspace_bytes: ", "world_size: got ", world_size, "; accepted: 1 to ",
                    kMaxRanks);
  Request request;
  request.dtype = check_dtype("workspace_bytes", dtype);
  request.bytes = numel * static_cast<uint64_t>(dtype_size(request.dtype));
  request.world = world_size;
  request.input_symmetric = request.output_symmetric = symmetric;
  request.algorithm = check_algorithm("workspace_bytes", algorithm);
  uint64_t most = 0;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    request.device = device;
    most = std::max(most, workspace_bytes(select_algorithm(request), request.dtype, request.bytes,
                                          world_size, symmetric));
  }
  return most;
}

}  // namespace collx
