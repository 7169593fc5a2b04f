// The two-shot pipeline over a tensor in chunks: scatter, reduce own part, gather the others'.
//
// Two slots suffice, although the next chunk is scattered before this one is gathered:
//   - Chunk c+1 is scattered into the slots from which chunk c-1 was read. This rank has seen every
//     peer's `reduced` of chunk c-1, which a peer publishes after that read.
//   - The result of chunk c is stored where the result of chunk c-2 was gathered from. This rank
//     has seen every peer's `arrived` of chunk c, which a peer publishes after it gathered c-2.
//   - The first chunk of a call claims its use, so any call may precede it.
// Every chunk exchanges both words between all pairs, even if their parts are empty.
#pragma once

#include "steps.h"

namespace collx::cpu {

/// A range of the tensor, in the unit that the steps use.
struct Chunk {
  uint64_t start;
  uint64_t count;
};

/// The part of a chunk that rank r reduces, relative to the chunk.
inline Part part_of(Chunk chunk, const Session& session, int r) {
  return partition(chunk.count, session.world(), r);
}

/// The locations of the parts of a use if senders write them into the receivers' slots.
struct PushPlaces {
  static constexpr Area kArea = Area::twoshot_push;
  static constexpr Phase kArrival = Phase::arrival;
  const Session& session;

  uint64_t slot_bytes() const { return session.layout().twoshot.slot_bytes; }
  bool in_place() const { return false; }
  char* outgoing(Use use, int peer) const {
    return session.twoshot_slot(peer, use, 0, session.rank());
  }
  const char* incoming(Use use, int peer) const {
    return session.twoshot_slot(session.rank(), use, 0, peer);
  }
  template <typename Visit>
  void for_each_result(Use use, Visit visit) const {
    for_each_peer(session,
                  [&](int peer) { visit(session.twoshot_slot(peer, use, 1, session.rank())); });
  }
  const char* result(Use use, int peer) const {
    return session.twoshot_slot(session.rank(), use, 1, peer);
  }
};

/// The locations if receivers read the parts from the senders' staging memory, which is divided by
/// receiver, and from their results.
struct PullPlaces {
  static constexpr Area kArea = Area::pull;
  static constexpr Phase kArrival = Phase::stage_barrier;
  const Session& session;

  uint64_t slot_bytes() const { return session.layout().result_bytes; }
  bool in_place() const { return !session.staged(); }
  char* outgoing(Use use, int peer) const {
    return session.staging(session.rank(), use) + static_cast<uint64_t>(peer) * slot_bytes();
  }
  const char* incoming(Use use, int peer) const {
    return session.staging(peer, use) + static_cast<uint64_t>(session.rank()) * slot_bytes();
  }
  template <typename Visit>
  void for_each_result(Use use, Visit visit) const {
    visit(session.results(session.rank(), use));
  }
  const char* result(Use use, int peer) const { return session.results(peer, use); }
};

/// Steps: scatter(use, chunk), reduce(use, chunk), gather(use, chunk).
template <typename Steps>
bool run_twoshot(Session& session, Area area, uint64_t total, uint64_t chunk_units, Phase arrival,
                 Steps steps) {
  const auto chunk_at = [&](uint64_t start) {
    return Chunk{start, std::min(chunk_units, total - start)};
  };
  const auto scatter = [&](Use use, uint64_t start) {
    steps.scatter(use, chunk_at(start));
    session.publish(use, Word::arrived);
  };
  Use next = session.next_use(area);
  if (!session.claim(next)) return false;
  scatter(next, 0);
  for (uint64_t start = 0; start < total; start += chunk_units) {
    const Use use = next;
    if (!session.await(use, Word::arrived, arrival)) return false;
    steps.reduce(use, chunk_at(start));
    session.publish(use, Word::reduced);
    if (start + chunk_units < total) {
      next = session.next_use(area);
      scatter(next, start + chunk_units);
    }
    if (!session.await(use, Word::reduced, Phase::gather)) return false;
    session.settle(use);
    steps.gather(use, chunk_at(start));
  }
  return true;
}

}  // namespace collx::cpu
