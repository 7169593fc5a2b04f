// An example of a new algorithm: rank 0 reads and reduces all inputs, and the other ranks read the
// result from it.
// Traffic: rank 0 reads W·n and writes n twice. The other ranks write n to the staging and read n.
// There are two exchanges per chunk.
#include "cpu/collectives/steps.h"

namespace collx::cpu {

bool allreduce_star(AllreduceSession& session, const CallKernels& kernels) {
  const int rank = session.rank();
  const uint64_t bytes = input_bytes(session), chunk = session.layout().result_bytes;
  for (uint64_t at = 0; at < bytes; at += chunk) {
    const uint64_t count = std::min(chunk, bytes - at);
    const Use use = session.next_use(Area::pull);
    if (!session.claim(use)) return false;
    if (rank != 0) {
      kernels.copy(session.staging(rank, use), session.input(at), count);
      session.publish_all(use);
      if (!session.await_from(0, use, Word::reduced, Phase::gather)) return false;
      kernels.copy(session.output(at), session.results(0, use), count);
      continue;
    }
    session.publish(use, Word::arrived);
    if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
    Operands operands;
    operands.sources[0] = session.input(at);
    for_each_peer(session, [&](int r) { operands.sources[r] = session.staging(r, use); });
    operands.add_target(session.results(0, use));
    operands.add_target(session.output(at));
    reduce(kernels, session, operands, count / element_bytes(session));
    session.publish(use, Word::reduced);
  }
  return true;
}

}  // namespace collx::cpu
