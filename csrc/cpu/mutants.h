// Deliberate errors that a test can enable in its own build, to show that the tests detect them.
//
// In every other build mutant() is false at compile time, and no machine code of the errors
// remains. The errors are in the session, where ranks synchronize, so they apply to every algorithm
// that uses it.
#pragma once

#include <atomic>
#include <cstdint>

namespace collx::cpu {

/// The protection that is disabled, with the hazard in docs/internals/protocol.md that it prevents.
enum class Mutant : uint8_t {
  none,
  epoch_stands_still,   // 3: the epoch of the first use forever, as if captured in a graph
  epoch_by_shape,       // 4: calls of different sizes count the uses of the same memory separately
  slots_by_shape,       // 4: the start of the second staging slot depends on the call
  no_closing_barrier,   // 11: a call returns while peers still use the rank's tensors
  one_slot,             // 14: each use overwrites the data that peers read in the previous use
  no_claim,             // 14: no check that a slot has been read
  only_root_publishes,  // 14: in a call with a root, the other ranks publish no word
  arrival_not_awaited,  // 20: pushed or staged data is read before it has arrived
  no_opening_barrier,   // 20: so is data that is read in place
  count
};

#if defined(COLLX_MUTANTS)
inline std::atomic<Mutant> active_mutant{Mutant::none};
inline bool mutant(Mutant one) { return active_mutant.load(std::memory_order_relaxed) == one; }
#else
constexpr bool mutant(Mutant) { return false; }
#endif

}  // namespace collx::cpu
