// Every rank reads all inputs: where they lie when they are symmetric, otherwise chunk by chunk
// from where their owners staged them.
// Traffic of a rank: n written to the staging, W·n read; one exchange a chunk (symmetric: two a
// call and no staging).
#include "steps.h"

namespace collx::cpu {
namespace {

bool pull_staged(Session& session, ReduceKernel reduce) {
  const int rank = session.rank();
  const uint64_t numel = session.call().numel;
  const uint64_t chunk = session.layout().staging_bytes / session.element();
  for (uint64_t at = 0; at < numel; at += chunk) {
    const uint64_t count = std::min(chunk, numel - at);
    const Use use = session.next_use(Channel::pull);
    copy(session.staging(rank, use), session.input(at), count * session.element());
    session.publish_all(use);
    // Overwritten two uses later, when every peer's word of the use between has been seen: it
    // follows that peer's reading below.
    if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
    Sources sources;
    sources.of[rank] = session.input(at);
    for_each_peer(session, [&](int peer) { sources.of[peer] = session.staging(peer, use); });
    reduce(sources.of, session.world(), session.output(at), count);
  }
  return true;
}

bool pull_symmetric(Session& session, ReduceKernel reduce) {
  if (!session.start_barrier()) return false;
  Sources sources;
  for (int r = 0; r < session.world(); ++r) sources.of[r] = session.peer_input(r, 0);
  reduce(sources.of, session.world(), session.output(0), session.call().numel);
  return session.end_barrier();
}

}  // namespace

bool allreduce_oneshot_pull(Session& session, ReduceKernel reduce) {
  // An input that is the output too may not change while peers read it. That it is, is the same on
  // all ranks: offsets of symmetric tensors agree.
  const bool overwritten = session.call().input == session.call().output;
  return session.inputs_symmetric() && !overwritten ? pull_symmetric(session, reduce)
                                                    : pull_staged(session, reduce);
}

}  // namespace collx::cpu
