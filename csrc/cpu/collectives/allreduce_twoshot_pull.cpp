// Every rank reduces its part, read from the peers' staging (symmetric inputs: from where they
// lie), and gathers the other parts from where their owners left them.
// Traffic of a rank: n·(W-1)/W staged, n read and reduced, n/W left for the peers, n·(W-1)/W
// gathered; two exchanges a chunk.
#include "twoshot.h"

namespace collx::cpu {
namespace {

struct PullSteps {
  AllreduceSession& session;
  const CallKernels& kernels;

  void scatter(Use use, Chunk chunk) const {
    if (session.inputs_symmetric()) return;
    for_each_peer(session, [&](int peer) {
      const Part part = part_of(chunk, session, peer);
      kernels.copy(session.staging(session.rank(), use) + part.start * session.element(),
                   session.input(chunk.start + part.start), part.count * session.element());
    });
  }

  const char* source(Use use, Chunk chunk, Part own, int peer) const {
    return session.inputs_symmetric() ? session.peer_input(peer, chunk.start + own.start)
                                      : session.staging(peer, use) + own.start * session.element();
  }

  void reduce(Use use, Chunk chunk) const {
    const Part own = part_of(chunk, session, session.rank());
    const uint64_t at = chunk.start + own.start;
    Operands operands;
    operands.sources[session.rank()] = session.input(at);
    for_each_peer(session,
                  [&](int peer) { operands.sources[peer] = source(use, chunk, own, peer); });
    operands.add_target(session.results(session.rank(), use));
    operands.add_target(session.output(at));
    collx::cpu::reduce(kernels, session, operands, own.count);
  }

  // In place, this overwrites what a peer has read: its result is here.
  void gather(Use use, Chunk chunk) const {
    for_each_peer(session, [&](int peer) {
      const Part part = part_of(chunk, session, peer);
      kernels.copy(session.output(chunk.start + part.start), session.results(peer, use),
                   part.count * session.element());
    });
  }
};

}  // namespace

bool allreduce_twoshot_pull(AllreduceSession& session, const CallKernels& kernels) {
  // The barrier names ranks whose offsets differ; the order itself needs none. Nor is one needed at
  // the end: a peer's last `reduced` says that it has read this rank's input to the end.
  if (session.inputs_symmetric() && !session.start_barrier()) return false;
  const uint64_t part_elements = session.layout().result_bytes / session.element();
  return run_twoshot(session, Channel::pull, session.call().numel,
                     part_elements * static_cast<uint64_t>(session.world()), Phase::stage_barrier,
                     PullSteps{session, kernels});
}

}  // namespace collx::cpu
