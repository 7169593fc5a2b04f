// The progress of ranks, as another thread or rank reads it while calls run.
#pragma once

#include "types.h"

namespace collx {

struct Progress {
  uint64_t completed;  // completed calls on the communicator
  /// The next call is in progress. Also false if the rank completes a call during the read; such a
  /// rank is not waiting.
  bool in_call;
};

/// Bit mask of the ranks for which the call in progress on `rank` may wait: those that are behind
/// and not in a call. If there are none, all ranks that are behind, since an earlier call of theirs
/// waits.
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
