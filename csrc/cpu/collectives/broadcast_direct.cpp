// Broadcast between the tensors themselves: every rank copies the whole tensor from the root's
// symmetric output, chunk by chunk while the root fills it. Traffic of the root: n copied once; of
// the others: n read. Two barriers, and one word from the root for each chunk.
#include "messages.h"
#include "steps.h"

namespace collx::cpu {

bool broadcast_direct(ExchangeSession& session, const CallKernels& kernels) {
  constexpr uint64_t kStrideBytes = 32 << 10;
  const ExchangeCall& call = session.call();
  const char* const root_output = session.peer_output(call.root);
  if (!session.start_barrier()) return false;
  for (uint64_t at = 0; at < call.longest; at += kStrideBytes) {
    const uint64_t bytes = std::min(kStrideBytes, call.longest - at);
    const Use use = session.next_use(Area::pull);
    if (session.is_root()) {
      copy(kernels.copy, {session.output()}, at, {session.input()}, at, bytes);
      session.publish_all(use);
      continue;
    }
    session.publish_all(use);
    if (!session.await_from(call.root, use, Word::arrived, Phase::stage_barrier)) return false;
    kernels.copy(session.output() + at, root_output + at, bytes);
  }
  // Peers only use the root's output, so only the root waits for them.
  const Use end = session.next_use(Area::end_barrier);
  session.publish(end, Word::arrived);
  return !session.is_root() || session.await(end, Word::arrived, Phase::end_barrier);
}

}  // namespace collx::cpu
