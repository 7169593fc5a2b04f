#include <cstring>

#include "calls.h"
#include "collectives/bodies.h"
#include "collectives/messages.h"
#include "simd/float_environment.h"

namespace collx::cpu {
namespace {

using Steps = bool (*)(ExchangeSession&, const CallKernels&);

bool keep(ExchangeSession& session, const CallKernels& kernels) {
  keep_own(session, kernels.copy);
  return true;
}

constexpr Body<Steps> kBodies[] = {
    {Algorithm::staged, kExchanges & ~kCounted, gather_scatter_staged},
    {Algorithm::direct, kPairs & ~kCounted, gather_scatter_direct},
    {Algorithm::staged, kCounted, alltoallv_staged},
    {Algorithm::direct, kCounted, alltoallv_direct},
    {Algorithm::direct, kBroadcast, broadcast_direct},
    {Algorithm::twostage, kBroadcast, broadcast_twostage},
    {Algorithm::pipelined, kBroadcast, broadcast_pipelined},
};
static_assert(are_complete(kBodies, kExchanges));

/// If the shapes alone show that messages are empty, they are empty on all ranks, and the ranks
/// exchange nothing. Alltoallv is different, since no rank has the splits of the others.
Steps steps_of(const CpuView& view, const ExchangeCall& call) {
  const Steps algorithm = require_body(kBodies, call.collective, call.plan.algorithm);
  if (call.collective == Collective::alltoallv) return algorithm;
  return view.world == 1 || call.longest == 0 ? keep : algorithm;
}

}  // namespace

bool exchange(const CpuView& view, const ExchangeCall& call) {
  const CallKernels kernels{
      is_reduction(call.collective) ? reduce_kernel(call.dtype, call.reduce_op) : nullptr,
      copy_kernel()};
  const Steps steps = steps_of(view, call);
  ExchangeSession session(view, call);
  if (row_of(call.collective).counted && call.splits.sent == nullptr) {
    session.set_counts(call.sends, call.expects);
  }
  if (!session.enter()) return false;
  if (view.check && !session.meet(Phase::check)) return false;
  const FloatEnvironment environment;
  if (!steps(session, kernels)) return false;
  if (call.cleared > 0) std::memset(call.output, 0, call.cleared);
  return session.complete();
}

bool barrier(const CpuView& view, const CallDescriptor& descriptor) {
  Call call{};
  call.descriptor = descriptor;
  Session session(view, call);
  if (!session.enter()) return false;
  // In checked mode the exchange of descriptors is a barrier by itself.
  if (!(view.check ? session.meet(Phase::check) : session.barrier(Phase::start_barrier))) {
    return false;
  }
  return session.complete();
}

}  // namespace collx::cpu
