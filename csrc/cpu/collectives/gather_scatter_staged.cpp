// Messages through the payload, chunk by chunk, for every collective whose ranks agree on the
// longest message and therefore on the number of uses.
// Traffic of a rank: it writes the messages that it sends to its staging memory (once if all ranks
// receive the same), and reads the messages that it receives from its peers' staging memory. One
// exchange for each chunk.
#include "staging.h"

namespace collx::cpu {

bool gather_scatter_staged(ExchangeSession& session, const CallKernels& kernels) {
  const ExchangeCall& call = session.call();
  const CpuSlots slots =
      cpu_slots(session.layout(), call.collective, call.longest, session.world());
  Span sent[kMaxRanks], received[kMaxRanks];
  for (int r = 0; r < session.world(); ++r) {
    sent[r] = call.sent(session.rank(), r);
    received[r] = call.received(r, session.rank());
  }
  const Staging staging(session, kernels, {sent, received}, slots);
  // In place, a chunk is sent before received data overwrites the same bytes.
  uint64_t at = 0;
  for (; at < call.longest; at += slots.chunk) {
    const Use use = session.next_use(Area::pull);
    if (!staging.send(use, at)) return false;
    session.publish_all(use);
    staging.keep(at, slots.chunk);
    if (!staging.receive(use, at)) return false;
  }
  staging.keep(at, kAnyMessage);
  return true;
}

}  // namespace collx::cpu
