// Every rank stores each part of its data at the part's owner, which reduces it and stores the
// result at every peer.
// Traffic of a rank: 2·n·(W-1)/W written to peers, n read and reduced, n copied to the output; two
// exchanges a chunk.
#include "twoshot.h"

namespace collx::cpu {
namespace {

struct PushSteps {
  AllreduceSession& session;
  const CallKernels& kernels;

  void scatter(Use use, Chunk chunk) const {
    for_each_peer(session, [&](int peer) {
      const Part part = part_of(chunk, session, peer);
      kernels.copy(session.twoshot_slot(peer, use, 0, session.rank()),
                   session.input(chunk.start + part.start), part.count * session.element());
    });
  }

  void reduce(Use use, Chunk chunk) const {
    const Part own = part_of(chunk, session, session.rank());
    const uint64_t at = chunk.start + own.start;
    Operands operands;
    operands.sources[session.rank()] = session.input(at);
    for_each_peer(session, [&](int peer) {
      operands.sources[peer] = session.twoshot_slot(session.rank(), use, 0, peer);
      operands.add_target(session.twoshot_slot(peer, use, 1, session.rank()));
    });
    operands.add_target(session.output(at));
    collx::cpu::reduce(kernels, session, operands, own.count);
  }

  void gather(Use use, Chunk chunk) const {
    for_each_peer(session, [&](int peer) {
      const Part part = part_of(chunk, session, peer);
      kernels.copy(session.output(chunk.start + part.start),
                   session.twoshot_slot(session.rank(), use, 1, peer),
                   part.count * session.element());
    });
  }
};

}  // namespace

bool allreduce_twoshot_push(AllreduceSession& session, const CallKernels& kernels) {
  const uint64_t part_elements = session.layout().twoshot.tile_bytes / session.element();
  return run_twoshot(session, Channel::twoshot_push, session.call().numel,
                     part_elements * static_cast<uint64_t>(session.world()), Phase::arrival,
                     PushSteps{session, kernels});
}

}  // namespace collx::cpu
