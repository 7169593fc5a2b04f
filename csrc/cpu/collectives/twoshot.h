// The two-shot pipeline over a tensor in chunks: scatter, reduce own part, gather the others'.
//
// Two slots suffice, although the next chunk is scattered before this one is gathered:
//   - Chunk c+1 is scattered into the slots that chunk c-1 was read from. This rank has seen every
//     peer's `reduced` of chunk c-1, which a peer publishes after that reading.
//   - The result of chunk c goes where the result of chunk c-2 was gathered from. This rank has
//     seen every peer's `arrived` of chunk c, which a peer publishes after it gathered c-2.
//   - Calls follow each other in the same way: a peer's `arrived` of the first chunk says that it
//     has completed the call before.
// Every chunk exchanges both words between all pairs, whether or not their parts are empty.
#pragma once

#include "steps.h"

namespace collx::cpu {

/// Elements of the tensor.
struct Chunk {
  uint64_t start;
  uint64_t count;

  /// The part that rank r reduces, relative to the chunk.
  Part part(const Session& session, int r) const { return partition(count, session.world(), r); }
};

/// Steps: scatter(use, chunk), reduce(use, chunk), gather(use, chunk).
template <typename Steps>
bool run_twoshot(Session& session, Channel channel, uint64_t chunk_elements, Phase arrival,
                 Steps steps) {
  const uint64_t numel = session.call().numel;
  const auto chunk_at = [&](uint64_t start) {
    return Chunk{start, std::min(chunk_elements, numel - start)};
  };
  const auto scatter = [&](uint64_t start) {
    const Use use = session.next_use(channel);
    steps.scatter(use, chunk_at(start));
    session.publish(use, Word::arrived);
    return use;
  };
  Use next = scatter(0);
  for (uint64_t start = 0; start < numel; start += chunk_elements) {
    const Use use = next;
    if (!session.await(use, Word::arrived, arrival)) return false;
    steps.reduce(use, chunk_at(start));
    session.publish(use, Word::reduced);
    if (start + chunk_elements < numel) next = scatter(start + chunk_elements);
    if (!session.await(use, Word::reduced, Phase::gather)) return false;
    steps.gather(use, chunk_at(start));
  }
  return true;
}

}  // namespace collx::cpu
