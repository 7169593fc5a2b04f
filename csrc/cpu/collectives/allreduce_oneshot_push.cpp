// Every rank stores its data at every peer and reduces what has arrived.
// Traffic of a rank: (W-1)·n written, W·n read; one exchange a chunk.
#include "steps.h"

namespace collx::cpu {

bool allreduce_oneshot_push(AllreduceSession& session, const CallKernels& kernels) {
  const int rank = session.rank();
  const uint64_t numel = session.call().numel;
  const uint64_t chunk = session.layout().oneshot.tile_bytes / session.element();
  for (uint64_t at = 0; at < numel; at += chunk) {
    const uint64_t count = std::min(chunk, numel - at);
    const Use use = session.next_use(Channel::oneshot_push);
    Operands operands;
    operands.sources[rank] = session.input(at);
    for_each_peer(session, [&](int peer) {
      kernels.copy(session.oneshot_slot(peer, use, rank), session.input(at),
                   count * session.element());
      operands.sources[peer] = session.oneshot_slot(rank, use, peer);
    });
    session.publish(use, Word::arrived);
    // The next use but one overwrites these slots: by then each peer has seen this rank's word of
    // the use between, which follows the reading below.
    if (!session.await(use, Word::arrived, Phase::arrival)) return false;
    operands.add_target(session.output(at));
    reduce(kernels, session, operands, count);
  }
  return true;
}

}  // namespace collx::cpu
