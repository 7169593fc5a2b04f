// Mistakes that a test can enable in a build of its own, to show that the tests detect them.
//
// In every other build mutant() is false at compile time, and nothing of this is left in the
// machine code. The mistakes are made where ranks follow each other, in the session, whatever
// algorithm runs over it.
#pragma once

#include <atomic>
#include <cstdint>

namespace collx::cpu {

/// The cure that is taken out, with the hazard of docs/internals/protocol.md that it stands
/// against.
enum class Mutant : uint8_t {
  none,
  epoch_stands_still,   // 3: the epoch of the first use for ever, as one baked into a graph
  epoch_by_shape,       // 4: calls of another size count the uses of the same memory apart
  slots_by_shape,       // 4: where the second slot of the staging starts follows from the call
  no_closing_barrier,   // 11: a call returns while peers still use the rank's tensors
  one_slot,             // 14: each use overwrites what peers read in the one before
  no_claim,             // 14: no check whether a slot has been read
  only_root_publishes,  // 14: in a call with a root, no word comes back from the others
  arrival_not_awaited,  // 20: what is pushed or staged is read before it has come
  no_opening_barrier,   // 20: what is read where it lies, too
  count
};

#if defined(COLLX_MUTANTS)
inline std::atomic<Mutant> active_mutant{Mutant::none};
inline bool mutant(Mutant one) { return active_mutant.load(std::memory_order_relaxed) == one; }
#else
constexpr bool mutant(Mutant) { return false; }
#endif

}  // namespace collx::cpu
