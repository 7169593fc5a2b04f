// The common parts of the algorithms: addresses by rank and loops over peers.
#pragma once

#include <algorithm>

#include "collectives.h"

namespace collx::cpu {

/// The locations of each rank's values in one reduction, and the destinations of the result.
struct Operands {
  const void* sources[kMaxRanks];
  void* targets[kMaxRanks];
  int target_count = 0;

  void add_target(void* target) { targets[target_count++] = target; }
};

inline void reduce(const CallKernels& kernels, const Session& session, const Operands& operands,
                   uint64_t count) {
  kernels.reduce(
      {operands.sources, session.world(), operands.targets, operands.target_count, count});
}

template <typename C>
uint64_t element_bytes(const SessionOf<C>& session) {
  return static_cast<uint64_t>(dtype_size(session.call().dtype));
}

inline uint64_t input_bytes(const AllreduceSession& session) {
  return session.call().numel * element_bytes(session);
}

/// Visits the peers in ring order, starting after this rank.
template <typename Visit>
void for_each_peer(const Session& session, Visit visit) {
  for (int step = 1; step < session.world(); ++step) visit(session.neighbor(step));
}

}  // namespace collx::cpu
