// Every rank gets all inputs, and sums and normalizes all rows: pushed into its slots, or pulled
// from where their owners staged them, or from where they lie when they are symmetric and not
// small. A chunk may end within a row, which then waits for the next one.
// Traffic of a rank: push: (W-1)·n written, W·n read; pull: n written, W·n read; one exchange a
// chunk (symmetric: two a call, nothing written).
#include "norm.h"

namespace collx::cpu {
namespace {

bool pull_staged(NormSession& session, CopyKernel copy, NormRows& rows) {
  const int rank = session.rank();
  const uint64_t chunk = session.layout().staging_bytes / session.element();
  for (uint64_t at = 0; at < session.numel(); at += chunk) {
    const uint64_t count = std::min(chunk, session.numel() - at);
    const Use use = session.next_use(Channel::pull);
    if (!session.claim(use)) return false;
    copy(session.staging(rank, use), session.input(at), count * session.element());
    session.publish_all(use);
    if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
    session.settle(use);
    Operands operands;
    operands.sources[rank] = session.input(at);
    for_each_peer(session, [&](int peer) { operands.sources[peer] = session.staging(peer, use); });
    rows.take(operands.sources, session.world(), at, count);
  }
  return true;
}

bool pull_symmetric(NormSession& session, NormRows& rows) {
  if (!session.start_barrier()) return false;
  Operands operands;
  for (int r = 0; r < session.world(); ++r) operands.sources[r] = session.peer_input(r, 0);
  rows.take(operands.sources, session.world(), 0, session.numel());
  return session.end_barrier();
}

/// Below this, staging with its single exchange is faster than two barriers.
constexpr uint64_t kSmallBytes = 8 << 10;

/// Whether peers read the inputs where they lie. The same on all ranks, since sizes and the offsets
/// of symmetric tensors agree.
bool reads_in_place(const NormSession& session) {
  // An input that is a result too may not change while peers read it.
  const NormCall& call = session.call();
  return session.inputs_symmetric() && call.input != call.normalized &&
         call.input != call.residual_out && session.numel() * session.element() > kSmallBytes;
}

}  // namespace

bool norm_oneshot_push(NormSession& session, CopyKernel copy, NormRows& rows) {
  const int rank = session.rank();
  const uint64_t chunk = session.layout().oneshot.tile_bytes / session.element();
  for (uint64_t at = 0; at < session.numel(); at += chunk) {
    const uint64_t count = std::min(chunk, session.numel() - at);
    const Use use = session.next_use(Channel::oneshot_push);
    Operands operands;
    operands.sources[rank] = session.input(at);
    for_each_peer(session, [&](int peer) {
      copy(session.oneshot_slot(peer, use, rank), session.input(at), count * session.element());
      operands.sources[peer] = session.oneshot_slot(rank, use, peer);
    });
    session.publish(use, Word::arrived);
    // Why the slots are free again two uses later: see allreduce_oneshot_push.
    if (!session.await(use, Word::arrived, Phase::arrival)) return false;
    rows.take(operands.sources, session.world(), at, count);
  }
  return true;
}

bool norm_oneshot_pull(NormSession& session, CopyKernel copy, NormRows& rows) {
  return reads_in_place(session) ? pull_symmetric(session, rows) : pull_staged(session, copy, rows);
}

}  // namespace collx::cpu
