// The one-shot loops: every rank gets all inputs chunk by chunk, pushed into its slots or pulled
// from their owners' staging memory. `take(operands, at, bytes)` gets the same bytes of each rank's
// input, starting at byte `at`.
#pragma once

#include "steps.h"

namespace collx::cpu {

template <typename Take>
bool push_to_all(Session& session, CopyKernel copy, uint64_t bytes, Take take) {
  const int rank = session.rank();
  const uint64_t chunk = session.layout().oneshot.slot_bytes;
  for (uint64_t at = 0; at < bytes; at += chunk) {
    const uint64_t count = std::min(chunk, bytes - at);
    const Use use = session.next_use(Area::oneshot_push);
    Operands operands;
    operands.sources[rank] = session.input(at);
    for_each_peer(session, [&](int peer) {
      copy(session.oneshot_slot(peer, use, rank), session.input(at), count);
      operands.sources[peer] = session.oneshot_slot(rank, use, peer);
    });
    session.publish(use, Word::arrived);
    // These slots are overwritten two uses later. By then each peer has seen this rank's word of
    // the use in between, which this rank publishes after the reads below.
    if (!session.await(use, Word::arrived, Phase::arrival)) return false;
    take(operands, at, count);
  }
  return true;
}

template <typename Take>
bool pull_staged(Session& session, CopyKernel copy, uint64_t bytes, Take take) {
  const int rank = session.rank();
  const uint64_t chunk = session.layout().staging_bytes;
  for (uint64_t at = 0; at < bytes; at += chunk) {
    const uint64_t count = std::min(chunk, bytes - at);
    const Use use = session.next_use(Area::pull);
    if (!session.claim(use)) return false;
    copy(session.staging(rank, use), session.input(at), count);
    session.publish_all(use);
    if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
    session.settle(use);
    Operands operands;
    operands.sources[rank] = session.input(at);
    for_each_peer(session, [&](int peer) { operands.sources[peer] = session.staging(peer, use); });
    take(operands, at, count);
  }
  return true;
}

/// Pulls from symmetric inputs, which stay unchanged between two barriers.
template <typename Take>
bool pull_in_place(Session& session, uint64_t bytes, Take take) {
  if (!session.start_barrier()) return false;
  Operands operands;
  for (int r = 0; r < session.world(); ++r) operands.sources[r] = session.peer_input(r);
  take(operands, 0, bytes);
  return session.end_barrier();
}

template <typename Take>
bool pull_from_all(Session& session, CopyKernel copy, uint64_t bytes, Take take) {
  return session.staged() ? pull_staged(session, copy, bytes, take)
                          : pull_in_place(session, bytes, take);
}

}  // namespace collx::cpu
