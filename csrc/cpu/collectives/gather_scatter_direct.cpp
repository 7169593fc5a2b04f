// Exchanges between the tensors themselves: messages are copied directly into the peers' symmetric
// outputs, or reduced directly from their symmetric inputs. No intermediate copies; two barriers
// for each call.
#include "messages.h"
#include "steps.h"

namespace collx::cpu {
namespace {

/// A rank that was paused must not continue to write tensors that its peers have abandoned. It
/// checks this after each stride.
constexpr uint64_t kStrideBytes = 256 << 10;

bool push(const ExchangeSession& session, const CallKernels& kernels) {
  const ExchangeCall& call = session.call();
  Span sent[kMaxRanks], received[kMaxRanks];
  for_each_peer(session, [&](int peer) {
    sent[peer] = call.sent(session.rank(), peer);
    received[peer] = call.received(session.rank(), peer);
  });
  return store_messages(session, kernels, {sent, received}, call.longest);
}

/// Strided messages are first packed into this rank's staging memory. No peer still reads that
/// memory, since all ranks have entered this call.
void pull_and_reduce(const ExchangeSession& session, const CallKernels& kernels) {
  const ExchangeCall& call = session.call();
  const int world = session.world(), own = session.rank();
  const Span result = call.received(own, own);
  const uint64_t total = result.bytes();
  const uint64_t room = session.layout().result_bytes;
  char* const together = session.view().region[own] + session.layout().staging;
  Source sources[kMaxRanks];
  for (int r = 0; r < world; ++r) {
    sources[r] = rows_of(r == own ? session.input() : session.peer_input(r), call.sent(r, own));
  }
  const Target target = rows_of(session.output(), result);
  const uint64_t stride = sources[0].dense() ? total : std::min<uint64_t>(room, 16 << 10);
  for (uint64_t at = 0; at < total; at += stride) {
    const uint64_t bytes = std::min(stride, total - at);
    Operands operands;
    for (int r = 0; r < world; ++r) {
      operands.sources[r] = sources[r].at(at);
      if (sources[r].dense()) continue;
      char* const slot = together + static_cast<uint64_t>(r) * room;
      copy(kernels.copy, {slot}, 0, sources[r], at, bytes);
      operands.sources[r] = slot;
    }
    operands.add_target(target.at(at));
    reduce(kernels, session, operands, bytes / call.element_bytes);
  }
}

/// Whether a peer uses this rank's tensors: it reads this rank's input or writes its output.
bool uses_tensors_of(const ExchangeSession& session, int peer) {
  const ExchangeCall& call = session.call();
  const int own = session.rank();
  return (is_reduction(call.collective) ? call.sent(own, peer) : call.received(peer, own)).bytes() >
         0;
}

}  // namespace

bool store_messages(const ExchangeSession& session, const CallKernels& kernels, Messages messages,
                    uint64_t longest) {
  for (uint64_t at = 0; at < longest; at += kStrideBytes) {
    if (!session.alive()) return false;
    for_each_peer(session, [&](int peer) {
      const Span& sent = messages.sent[peer];
      if (at >= sent.bytes()) return;
      copy(kernels.copy, rows_of(session.peer_output(peer), messages.received[peer]), at,
           rows_of(session.input(), sent), at, std::min(kStrideBytes, sent.bytes() - at));
    });
  }
  return true;
}

bool gather_scatter_direct(ExchangeSession& session, const CallKernels& kernels) {
  const ExchangeCall& call = session.call();
  if (!session.start_barrier()) return false;
  if (session.reduces()) {
    pull_and_reduce(session, kernels);
  } else if (!is_reduction(call.collective) && !push(session, kernels)) {
    return false;
  }
  const Use end = session.next_use(Area::end_barrier);
  session.publish(end, Word::arrived);
  if (!session.reduces()) keep_own(session, kernels.copy);
  for (int step = 1; step < session.world(); ++step) {
    const int peer = session.neighbor(step);
    if (!uses_tensors_of(session, peer)) continue;
    if (!session.await_from(peer, end, Word::arrived, Phase::end_barrier)) return false;
  }
  return true;
}

}  // namespace collx::cpu
