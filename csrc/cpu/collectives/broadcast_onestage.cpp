// Broadcast in one stage: every rank copies all of it from the root, out of the root's staging or,
// when outputs are symmetric, out of the root's output, chunk by chunk while it is filled.
// Traffic of the root: n copied once; of the others: n read. One word of the root a chunk.
#include "messages.h"
#include "steps.h"

namespace collx::cpu {
namespace {

constexpr uint64_t kStrideBytes = 32 << 10;
/// Up to this, staging with its single word is faster than two barriers.
constexpr uint64_t kSmallBytes = 16 << 10;

bool pull_from_output(ExchangeSession& session, const CallKernels& kernels) {
  const ExchangeCall& call = session.call();
  const char* const root_output = session.peer_output(call.root);
  if (!session.start_barrier()) return false;
  for (uint64_t at = 0; at < call.longest; at += kStrideBytes) {
    const uint64_t bytes = std::min(kStrideBytes, call.longest - at);
    const Use use = session.next_use(Channel::pull);
    if (session.is_root()) {
      copy(kernels.copy, {session.output()}, at, {session.input()}, at, bytes);
      session.publish_all(use);
      continue;
    }
    session.publish_all(use);
    if (!session.await_from(call.root, use, Word::arrived, Phase::stage_barrier)) return false;
    kernels.copy(session.output() + at, root_output + at, bytes);
  }
  // The root's output is the one that peers use.
  const Use end = session.next_use(Channel::end_barrier);
  session.publish(end, Word::arrived);
  return !session.is_root() || session.await(end, Word::arrived, Phase::end_barrier);
}

/// Up to this, the single exchange of the staging is faster.
constexpr uint64_t kStagedBytes = 64 << 10;

}  // namespace

bool broadcast_onestage(ExchangeSession& session, const CallKernels& kernels) {
  // The same on all ranks, since symmetry and sizes agree.
  const bool large = session.call().longest > kStagedBytes;
  return large && session.outputs_symmetric() ? pull_from_output(session, kernels)
                                              : exchange_staged(session, kernels);
}

}  // namespace collx::cpu
