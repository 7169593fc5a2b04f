// Finds the rank to blame when waits have failed.
//
// A rank whose wait times out writes a note into every rank's inbox that names the missing rank.
// judge() starts at the first rank that failed and follows the notes from each rank to the ranks
// that it waited for. The search ends at a rank without a note of a wait: that rank is missing.
#pragma once

#include "region_header.h"

namespace collx {

/// How long ranks that are still alive have to write their notes: a fraction of the timeout of a
/// wait, and at most half of the one second by which an error may exceed that timeout.
constexpr uint64_t grace_ns(uint64_t timeout_ns) {
  constexpr uint64_t kMost = 500'000'000;
  return timeout_ns / 4 < kMost ? timeout_ns / 4 : kMost;
}

struct Verdict {
  StatusRecord record;  // of the wait, or of another failure
  bool final;           // no later note of a wait can change it
};

/// Judges, from the notes of an inbox, a failure that rank `first` reported first. Only notes of
/// the ranks in `left` (a bit mask) are read. Ranks in `quiet` will not write a note any more.
constexpr Verdict judge(const Note* inbox, uint32_t left, uint32_t quiet, int first, int world) {
  const uint32_t silent = ((1u << world) - 1) & ~left;
  int queue[kMaxRanks] = {first};
  int waits_for_it[kMaxRanks] = {};  // by rank: the rank nearest to `first` that waits for it
  uint32_t queued = 1u << first;
  int count = 1;
  for (int i = 0; i < count; ++i) {
    const int rank = queue[i];
    const uint32_t bit = 1u << rank;
    const StatusRecord& own = inbox[rank].record;
    if ((silent & bit) != 0 || own.failure == Failure::none) {
      Verdict verdict{inbox[waits_for_it[rank]].record, false};
      if (verdict.record.peer != rank) {
        verdict.record.peer = rank;
        verdict.record.expected = verdict.record.seen = 0;  // they belong to a different wait
      }
      // If all other ranks have left notes, a note of this rank could only close a cycle. The
      // verdict stays the same if `first` waited for this rank.
      const bool alone = silent == bit && inbox[first].record.peer == rank;
      verdict.final = (silent & bit & ~quiet) == 0 || alone;
      return verdict;
    }
    // The cause of the other waits: a different failure, or a wait for the process group.
    if (own.failure != Failure::timeout || own.peer < 0) return {own, true};
    for (int peer = 0; peer < world; ++peer) {
      if (peer != own.peer && inbox[rank].missed[peer] == 0) continue;
      if ((queued >> peer & 1) != 0) continue;
      queued |= 1u << peer;
      waits_for_it[peer] = rank;
      queue[count++] = peer;
    }
  }
  return {inbox[first].record, (silent & ~quiet) == 0};  // they wait for each other
}

}  // namespace collx
