// Epochs count the uses of a piece of protocol memory. They live where the memory lives, are
// advanced by the kernel that used it, and are compared by signed difference: they wrap around.
#pragma once

#include "types.h"

namespace collx {

/// True when a counter that shows `seen` has reached `expected`, also across the wrap-around.
COLLX_HD constexpr bool epoch_reached(uint32_t seen, uint32_t expected) {
  return static_cast<int32_t>(seen - expected) >= 0;
}

/// Bookkeeping of one tile of slots. A tile belongs to one block for the length of a call; `busy`
/// is set by that block and cleared by the 8-byte store that advances the epoch, so that two
/// kernels on the same tile at once are noticed.
struct alignas(8) TileEntry {
  uint32_t epoch;
  uint32_t busy;
};

}  // namespace collx
