// How n units of work are divided among W ranks: rank r gets n div W, the low ranks one more.
#pragma once

#include "types.h"

namespace collx {

struct Part {
  uint64_t start;
  uint64_t count;
};

COLLX_HD constexpr Part partition(uint64_t n, int world, int rank) {
  const uint64_t w = static_cast<uint64_t>(world), r = static_cast<uint64_t>(rank);
  const uint64_t quotient = n / w, remainder = n % w;
  return {r * quotient + (r < remainder ? r : remainder), quotient + (r < remainder ? 1 : 0)};
}

/// The largest part: every pair of ranks exchanges this many units, fillers where its part is
/// shorter, since a tile that some pair leaves out could be overwritten before it was read.
COLLX_HD constexpr uint64_t largest_part(uint64_t n, int world) {
  return ceil_div(n, static_cast<uint64_t>(world));
}

}  // namespace collx
