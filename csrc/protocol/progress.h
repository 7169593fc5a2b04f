// How far ranks have come, as another thread or rank reads it while calls run.
#pragma once

#include "types.h"

namespace collx {

struct Progress {
  uint64_t completed;  // calls on the communicator
  /// The next one is under way. False also for a rank that completes a call while it is read: it
  /// does not wait.
  bool in_call;
};

/// Bits of the ranks for which the call under way on `rank` may wait: those that are behind and in
/// no call. If there are none, those that are behind because an earlier call of theirs waits.
constexpr uint32_t missing_ranks(const Progress* of, int rank, int world) {
  uint32_t behind = 0, absent = 0;
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank || of[peer].completed > of[rank].completed) continue;
    const bool here = of[peer].completed == of[rank].completed && of[peer].in_call;
    if (here) continue;
    behind |= 1u << peer;
    if (!of[peer].in_call) absent |= 1u << peer;
  }
  return absent != 0 ? absent : behind;
}

}  // namespace collx
