// The owner of a part pulls it from all symmetric inputs and stores the result to all symmetric
// outputs, without intermediate copies. It also works in place, since only the owner accesses a
// part.
// Traffic of a rank: n read, n written; two barriers for each call.
#include "steps.h"

namespace collx::cpu {

bool allreduce_pull_push(AllreduceSession& session, const CallKernels& kernels) {
  if (!session.start_barrier()) return false;
  constexpr uint64_t kStrideBytes = 256 << 10;
  const uint64_t element = element_bytes(session);
  const Part part = partition(session.call().numel, session.world(), session.rank());
  const uint64_t end = (part.start + part.count) * element;
  for (uint64_t at = part.start * element; at < end; at += kStrideBytes) {
    Operands operands;
    operands.sources[session.rank()] = session.input(at);
    for_each_peer(session, [&](int peer) {
      operands.sources[peer] = session.peer_input(peer, at);
      operands.add_target(session.peer_output(peer, at));
    });
    // A rank that was paused here must not continue to write tensors that its peers have abandoned.
    if (!session.alive()) return false;
    operands.add_target(session.output(at));
    reduce(kernels, session, operands, std::min(kStrideBytes, end - at) / element);
  }
  return session.end_barrier();
}

}  // namespace collx::cpu
