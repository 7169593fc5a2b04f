// Every rank reads all inputs: where they lie when they are symmetric and not small, otherwise
// chunk by chunk from where their owners staged them. Traffic of a rank: n written to the staging,
// W·n read; one exchange a chunk (symmetric: two a call and no staging).
#include "steps.h"

namespace collx::cpu {
namespace {

bool pull_staged(AllreduceSession& session, const CallKernels& kernels) {
  const int rank = session.rank();
  const uint64_t numel = session.call().numel;
  const uint64_t chunk = session.layout().staging_bytes / session.element();
  for (uint64_t at = 0; at < numel; at += chunk) {
    const uint64_t count = std::min(chunk, numel - at);
    const Use use = session.next_use(Channel::pull);
    if (!session.claim(use)) return false;
    kernels.copy(session.staging(rank, use), session.input(at), count * session.element());
    session.publish_all(use);
    if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
    session.settle(use);
    Operands operands;
    operands.sources[rank] = session.input(at);
    for_each_peer(session, [&](int peer) { operands.sources[peer] = session.staging(peer, use); });
    operands.add_target(session.output(at));
    reduce(kernels, session, operands, count);
  }
  return true;
}

bool pull_symmetric(AllreduceSession& session, const CallKernels& kernels) {
  if (!session.start_barrier()) return false;
  Operands operands;
  for (int r = 0; r < session.world(); ++r) operands.sources[r] = session.peer_input(r, 0);
  operands.add_target(session.output(0));
  reduce(kernels, session, operands, session.call().numel);
  return session.end_barrier();
}

/// Below this, staging with its single exchange is faster than two barriers.
constexpr uint64_t kSmallBytes = 8 << 10;

/// Whether peers read the inputs where they lie. The same on all ranks, since sizes and the offsets
/// of symmetric tensors agree.
bool reads_in_place(const AllreduceSession& session) {
  // An input that is the output too may not change while peers read it.
  return session.inputs_symmetric() && session.call().input != session.call().output &&
         session.call().numel * session.element() > kSmallBytes;
}

}  // namespace

bool allreduce_oneshot_pull(AllreduceSession& session, const CallKernels& kernels) {
  return reads_in_place(session) ? pull_symmetric(session, kernels) : pull_staged(session, kernels);
}

}  // namespace collx::cpu
