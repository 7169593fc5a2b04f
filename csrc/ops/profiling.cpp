#include "profiling.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>
#include <vector>

#include "../protocol/names.h"
#include "communicator.h"
#include "enqueue.h"

namespace collx {

namespace {

at::ScalarType dtype_of_elements(const CallDescriptor& call) {
  return call.scalar_type == 0 ? at::kByte : static_cast<at::ScalarType>(call.scalar_type - 1);
}

std::string name_of_range(const Communicator& communicator, const CallRequest& request,
                          const Call& call) {
  return "collx." + std::string(request.op()) + ' ' + std::string(name_of(call.plan.algorithm)) +
         ", " + std::to_string(request.input_bytes()) + " bytes, " +
         std::to_string(communicator.options().world_size) + " ranks";
}

/// The number of elements in a rank's result, for a collective without splits.
int64_t results_of(const CallDescriptor& call, int64_t numel, int world) {
  if (call.collective == Collective::allgather) return static_cast<int64_t>(call.numel);
  if (call.collective == Collective::gather) return numel * world;
  if (call.collective == Collective::reducescatter || call.collective == Collective::scatter) {
    return (numel + world - 1) / world;
  }
  return numel;
}

/// The distance between neighbors; -1 if it is not the same for all of them.
int64_t stride_of(const std::vector<int64_t>& ranks) {
  const int64_t stride = ranks.size() > 1 ? ranks[1] - ranks[0] : -1;
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != stride) return -1;
  }
  return stride;
}

std::shared_ptr<torch::ParamCommsDebugInfo> fields_of(const Communicator& communicator,
                                                      const CallRequest& request,
                                                      const Call& call) {
  const CommunicatorOptions& o = communicator.options();
  const CallDescriptor& d = call.descriptor;
  const at::ScalarType dtype = dtype_of_elements(d);
  const auto given = static_cast<int64_t>(request.input_bytes() / c10::elementSize(dtype));
  return std::make_shared<torch::ParamCommsDebugInfo>(
      std::make_tuple(o.group_name, o.name), o.rank, std::string(request.op()), given,
      results_of(d, given, o.world_size), dtype, std::vector<int64_t>{}, std::vector<int64_t>{},
      o.global_ranks.empty() ? -1 : o.global_ranks[0], stride_of(o.global_ranks), o.world_size);
}

struct Ranges {
  Ranges(const Communicator& communicator, const CallRequest& request, const Call& call)
      : outer(at::RecordScope::USER_SCOPE),
        fields(c10::DebugInfoKind::PARAM_COMMS_INFO, fields_of(communicator, request, call)),
        inner(at::RecordScope::FUNCTION) {
    outer.before(name_of_range(communicator, request, call));
    inner.before(at::kParamCommsCallName);
  }

  at::RecordFunction outer;
  c10::DebugInfoGuard fields;
  at::RecordFunction inner;  // ends first
};

}  // namespace

void ProfiledCall::begin(const Communicator& communicator, const CallRequest& request,
                         const Call& call) {
  ranges_ = std::make_shared<Ranges>(communicator, request, call);
}

}  // namespace collx
