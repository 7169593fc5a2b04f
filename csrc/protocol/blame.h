// Who is named when waits have failed: the end of the chain of blame.
//
// A rank whose wait times out leaves a note in every rank's inbox that names the missing rank.
// From the first rank that failed the notes lead on, from a rank to those that it waited for, to
// one that has left no note of a wait. That one is missing.
#pragma once

#include "region_header.h"

namespace collx {

/// For how long ranks that are still there may leave their notes: a part of the time that waits
/// have, and no more than half of the second by which an error may come later than that.
constexpr uint64_t grace_ns(uint64_t timeout_ns) {
  constexpr uint64_t kMost = 500'000'000;
  return timeout_ns / 4 < kMost ? timeout_ns / 4 : kMost;
}

struct Verdict {
  StatusRecord record;  // of the wait, or of another failure
  bool final;           // no note of a wait that is still to come changes it
};

/// What an inbox says of a failure that rank `first` was the first to report. Only notes of the
/// ranks `left` (bits) are looked at; those of `quiet` leave none any more.
constexpr Verdict judge(const Note* inbox, uint32_t left, uint32_t quiet, int first, int world) {
  const uint32_t silent = ((1u << world) - 1) & ~left;
  int queue[kMaxRanks] = {first};
  int waits_for_it[kMaxRanks] = {};  // who does, of those closest to the first
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
        verdict.record.expected = verdict.record.seen = 0;  // of another wait of that rank
      }
      // Where all others have left notes, one of this rank could only close a circle, which comes
      // to the same if it is the one that the first waited for.
      const bool alone = silent == bit && inbox[first].record.peer == rank;
      verdict.final = (silent & bit & ~quiet) == 0 || alone;
      return verdict;
    }
    // What kept the others waiting: another failure, or a wait for the process group.
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
