// The owner of a part pulls it from all symmetric inputs and stores the result to all symmetric
// outputs: no copy in between, and in place as well, since a part is its owner's alone.
// Traffic of a rank: n read, n written; two barriers a call.
#include "../failure.h"
#include "steps.h"

namespace collx::cpu {

bool allreduce_pull_push(Session& session, ReduceKernel reduce) {
  if (!session.start_barrier()) return false;
  constexpr uint64_t kStrideBytes = 256 << 10;
  const uint64_t stride = kStrideBytes / session.element();
  const Part part = partition(session.call().numel, session.world(), session.rank());
  for (uint64_t done = 0; done < part.count; done += stride) {
    const uint64_t at = part.start + done;
    Sources sources;
    Targets targets;
    sources.of[session.rank()] = session.input(at);
    for_each_peer(session, [&](int peer) {
      sources.of[peer] = session.peer_input(peer, at);
      targets.add(session.peer_output(peer, at));
    });
    // A rank that was stopped here must not go on to write tensors that its peers have given up.
    if (poisoned(session.view())) break;
    reduce_to_all(reduce, session, sources, session.output(at), targets,
                  std::min(stride, part.count - done));
  }
  return session.end_barrier();
}

}  // namespace collx::cpu
