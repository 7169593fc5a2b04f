// Divides n units of work among W ranks: each gets n div W units, and the lowest n mod W ranks one
// more.
#pragma once

#include "types.h"

namespace collx {

struct Part {
  uint64_t start;
  uint64_t count;
};

/// Holds the result of the division, so that it is computed once for the parts of all ranks.
struct Partition {
  uint64_t quotient = 0;
  uint64_t remainder = 0;

  Partition() = default;
  COLLX_HD constexpr Partition(uint64_t n, int world)
      : quotient(n / static_cast<uint64_t>(world)), remainder(n % static_cast<uint64_t>(world)) {}

  COLLX_HD constexpr Part part(int rank) const {
    const uint64_t r = static_cast<uint64_t>(rank);
    return {r * quotient + (r < remainder ? r : remainder), quotient + (r < remainder ? 1 : 0)};
  }
  COLLX_HD constexpr uint64_t largest() const { return quotient + (remainder > 0 ? 1 : 0); }
};

COLLX_HD constexpr Part partition(uint64_t n, int world, int rank) {
  return Partition(n, world).part(rank);
}

/// The largest part. Every pair of ranks exchanges this many units, with filler if the part is
/// shorter. A tile that a pair skipped could be overwritten before it was read.
COLLX_HD constexpr uint64_t largest_part(uint64_t n, int world) {
  return ceil_div(n, static_cast<uint64_t>(world));
}

}  // namespace collx
