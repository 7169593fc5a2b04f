#include "exchange.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "../protocol/names.h"
#include "collectives/messages.h"
#include "simd/float_environment.h"

namespace collx::cpu {
namespace {

using Steps = bool (*)(ExchangeSession&, const CallKernels&);

bool keep(ExchangeSession& session, const CallKernels& kernels) {
  keep_own(session, kernels.copy);
  return true;
}

[[noreturn]] void refuse(const ExchangeCall& call) {
  throw std::invalid_argument("algorithm " + std::string(name_of(call.plan.algorithm)) + " of " +
                              std::string(name_of(call.collective)) + " has no CPU kernel");
}

Steps broadcast_of(const ExchangeCall& call) {
  switch (call.plan.algorithm) {
    case Algorithm::onestage:
      return broadcast_onestage;
    case Algorithm::twostage:
      return broadcast_twostage;
    case Algorithm::pipelined:
      return broadcast_pipelined;
    default:
      refuse(call);
  }
}

Steps algorithm_of(const ExchangeCall& call) {
  switch (call.collective) {
    case Collective::reducescatter:
    case Collective::allgather:
    case Collective::reduce:
    case Collective::gather:
    case Collective::scatter:
    case Collective::alltoall:
      if (call.plan.algorithm == Algorithm::staged) return exchange_staged;
      if (call.plan.algorithm == Algorithm::direct) return exchange_direct;
      refuse(call);
    case Collective::alltoallv:
      if (call.plan.algorithm == Algorithm::staged) return alltoallv_staged;
      refuse(call);
    case Collective::broadcast:
      return broadcast_of(call);
    default:
      refuse(call);
  }
}

/// Empty messages by the shapes alone: empty on one rank is empty on all, and nothing is exchanged.
/// Alltoallv is different, since no rank knows of the others'.
Steps steps_of(const RankView& view, const ExchangeCall& call) {
  const Steps algorithm = algorithm_of(call);
  if (call.collective == Collective::alltoallv) return algorithm;
  return view.world == 1 || call.longest == 0 ? keep : algorithm;
}

/// Bytes between each two ranks, where these alone know them.
struct PairBytes {
  uint64_t sends[kMaxRanks];
  uint64_t expects[kMaxRanks];
};

void tell_pairs(ExchangeSession& session, PairBytes& pairs) {
  const ExchangeCall& call = session.call();
  if (call.collective != Collective::alltoallv || call.splits.sent != nullptr) return;
  for (int r = 0; r < session.world(); ++r) {
    pairs.sends[r] = call.sent[r].bytes();
    pairs.expects[r] = call.received[r].bytes();
  }
  session.set_counts(pairs.sends, pairs.expects);
}

}  // namespace

bool exchange(const RankView& view, const ExchangeCall& call) {
  const CallKernels kernels{
      is_reduction(call.collective) ? reduce_kernel(call.dtype, call.reduce_op) : nullptr,
      copy_kernel()};
  const Steps steps = steps_of(view, call);
  ExchangeSession session(view, call);
  PairBytes pairs;
  tell_pairs(session, pairs);
  if (!session.enter()) return false;
  if (view.check && !session.meet(Phase::check)) return false;
  const FloatEnvironment environment;
  if (!steps(session, kernels)) return false;
  if (call.cleared > 0) std::memset(call.output, 0, call.cleared);
  session.complete();
  return true;
}

bool barrier(const RankView& view, const CallDescriptor& descriptor) {
  Call call{};
  call.descriptor = descriptor;
  Session session(view, call);
  if (!session.enter()) return false;
  // In checked mode the exchange of descriptors is a barrier by itself.
  if (!(view.check ? session.meet(Phase::check) : session.barrier(Phase::start_barrier))) {
    return false;
  }
  session.complete();
  return true;
}

}  // namespace collx::cpu
