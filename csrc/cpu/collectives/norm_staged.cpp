// Each rank receives, sums and normalizes its own part of the rows. It stages a chunk of each
// peer's part, and the owner of the part reads the chunk from there. A chunk may end within a row.
// Traffic of a rank: n·(W-1)/W written to its staging memory, n read; one exchange for each chunk.
#include "norm_steps.h"

namespace collx::cpu {

bool norm_staged(NormSession& session, CopyKernel copy, NormRows& rows) {
  const NormCall& call = session.call();
  const int rank = session.rank(), world = session.world();
  const Partition parts(call.rows, world);
  const uint64_t element = element_bytes(session), row = call.cols * element;
  const uint64_t longest = parts.largest() * row;
  const CpuSlots slots = cpu_slots(session.layout(), call.collective, longest, world);
  const uint64_t chunk = slots.chunk;
  const auto part_of = [&](int r) {  // in bytes
    const Part part = parts.part(r);
    return Part{part.start * row, part.count * row};
  };
  const Part own = part_of(rank);
  for (uint64_t at = 0; at < longest; at += chunk) {
    const auto count_of = [&](Part part) {
      return at < part.count ? std::min(chunk, part.count - at) : 0;
    };
    const Use use = session.next_use(Area::pull);
    if (!session.claim(use)) return false;
    for_each_peer(session, [&](int peer) {
      const Part part = part_of(peer);
      if (count_of(part) == 0) return;
      copy(session.staging(rank, use) + slots.offset(rank, peer), session.input(part.start + at),
           count_of(part));
    });
    session.publish_all(use);
    if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
    session.settle(use);
    if (count_of(own) == 0) continue;
    Operands operands;
    operands.sources[rank] = session.input(own.start + at);
    for_each_peer(session, [&](int peer) {
      operands.sources[peer] = session.staging(peer, use) + slots.offset(peer, rank);
    });
    rows.take(operands.sources, world, at / element, count_of(own) / element);
  }
  return true;
}

}  // namespace collx::cpu
