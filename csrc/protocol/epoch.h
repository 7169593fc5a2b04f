// Epochs count the uses of a piece of protocol memory. They are stored in the same region. The
// kernel that uses the memory advances its epoch. Comparisons use the signed difference because
// epochs wrap around.
#pragma once

#include "types.h"

namespace collx {

/// Whether a counter with the value `seen` has reached `expected`, also across a wrap-around.
COLLX_HD constexpr bool epoch_reached(uint32_t seen, uint32_t expected) {
  return static_cast<int32_t>(seen - expected) >= 0;
}

/// State of one tile of slots. A tile belongs to one block for the duration of a call. That block
/// sets `busy`, and the 8-byte store that advances the epoch clears it. This detects two kernels
/// that use the same tile at once.
struct alignas(8) TileEntry {
  uint32_t epoch;
  uint32_t busy;
};

}  // namespace collx
