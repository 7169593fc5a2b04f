// What the algorithms have in common: loops over peers, and reducing with copies for others.
#pragma once

#include <algorithm>
#include <cstring>

#include "collectives.h"

namespace collx::cpu {

/// Addresses by rank.
struct Sources {
  const void* of[kMaxRanks];
};
struct Targets {
  char* of[kMaxRanks];
  int count = 0;
  void add(char* target) { of[count++] = target; }
};

inline void copy(void* to, const void* from, uint64_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);  // empty tensors may have no address
}

/// In the order of the ring after this rank, so that not all ranks load the same peer at once.
template <typename Visit>
void for_each_peer(const Session& session, Visit visit) {
  for (int step = 1; step < session.world(); ++step) {
    visit((session.rank() + step) % session.world());
  }
}

/// Reduces into `output` and copies the result to every target, in blocks that the copies find
/// in the first-level cache.
inline void reduce_to_all(ReduceKernel reduce, const Session& session, Sources sources,
                          char* output, Targets targets, uint64_t count) {
  constexpr uint64_t kBlockBytes = 16 << 10;
  const uint64_t block = kBlockBytes / session.element();
  for (uint64_t at = 0; at < count; at += block) {
    const uint64_t n = std::min(block, count - at);
    const uint64_t bytes = n * session.element();
    reduce(sources.of, session.world(), output, n);
    for (int t = 0; t < targets.count; ++t) {
      std::memcpy(targets.of[t], output, bytes);
      targets.of[t] += bytes;
    }
    for (int r = 0; r < session.world(); ++r) {
      sources.of[r] = static_cast<const char*>(sources.of[r]) + bytes;
    }
    output += bytes;
  }
}

}  // namespace collx::cpu
