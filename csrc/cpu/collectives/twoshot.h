// The two-shot pipeline over a tensor in chunks: scatter, reduce own part, gather the others'.
//
// Two slots suffice, although the next chunk is scattered before this one is gathered:
//   - Chunk c+1 is scattered into the slots that chunk c-1 was read from. This rank has seen every
//     peer's `reduced` of chunk c-1, which a peer publishes after that reading.
//   - The result of chunk c goes where the result of chunk c-2 was gathered from. This rank has
//     seen every peer's `arrived` of chunk c, which a peer publishes after it gathered c-2.
//   - The first chunk of a call claims its use, so any call may have come before.
// Every chunk exchanges both words between all pairs, whether or not their parts are empty.
#pragma once

#include "steps.h"

namespace collx::cpu {

/// Units of the tensor, whatever the steps count in.
struct Chunk {
  uint64_t start;
  uint64_t count;
};

/// The part of a chunk that rank r reduces, relative to the chunk.
inline Part part_of(Chunk chunk, const Session& session, int r) {
  return partition(chunk.count, session.world(), r);
}

/// Steps: scatter(use, chunk), reduce(use, chunk), gather(use, chunk).
template <typename Steps>
bool run_twoshot(Session& session, Channel channel, uint64_t total, uint64_t chunk_units,
                 Phase arrival, Steps steps) {
  const auto chunk_at = [&](uint64_t start) {
    return Chunk{start, std::min(chunk_units, total - start)};
  };
  const auto scatter = [&](Use use, uint64_t start) {
    steps.scatter(use, chunk_at(start));
    session.publish(use, Word::arrived);
  };
  Use next = session.next_use(channel);
  if (!session.claim(next)) return false;
  scatter(next, 0);
  for (uint64_t start = 0; start < total; start += chunk_units) {
    const Use use = next;
    if (!session.await(use, Word::arrived, arrival)) return false;
    steps.reduce(use, chunk_at(start));
    session.publish(use, Word::reduced);
    if (start + chunk_units < total) {
      next = session.next_use(channel);
      scatter(next, start + chunk_units);
    }
    if (!session.await(use, Word::reduced, Phase::gather)) return false;
    session.settle(use);
    steps.gather(use, chunk_at(start));
  }
  return true;
}

}  // namespace collx::cpu
