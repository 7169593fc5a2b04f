// The symmetric region that each rank owns, one per communicator: a header, which is the same on
// every device, followed by the areas of cuda_layout.h or cpu_layout.h.
#pragma once

#include "status.h"
#include "types.h"

namespace collx {

inline constexpr uint64_t kDefaultPayloadBytes = 128ull << 20;

/// Mailbox of one rank for checked mode: written by that rank, read by the region's owner.
struct alignas(128) CheckSlot {
  CallDescriptor descriptor;
  uint64_t flag;  // {epoch : high 32, fingerprint : low 32}, stored with release after it
};

struct alignas(128) RegionHeader {
  /// 0, or 1 + the rank that failed first. Written by any rank, read by every wait.
  alignas(128) uint32_t poison;
  /// The owner's own words, on a line of their own.
  alignas(128) uint32_t claimed;  // CUDA: by the thread that writes HostStatus::by_kernel
  uint32_t check_epoch;           // advanced by the last block of a checked call
  uint32_t check_blocks;          // blocks of this call that have passed the check
  uint32_t counts_epoch;          // the same two for the exchange of counts
  uint32_t counts_blocks;
  uint32_t noted;     // CUDA: by the first thread that fails, which leaves the note
  uint64_t sequence;  // calls completed
  // CUDA, while init measures what devices hold at once: blocks of the grid that have started, and
  // blocks that did not see all ranks' grids complete.
  uint32_t started;
  uint32_t unmet;
  /// Notes of the ranks that failed, by rank. The first of them leaves its own before it sets
  /// `poison`.
  Note inbox[kMaxRanks];
  /// Two of each, so that a fast rank's next call does not overwrite what is still read.
  CheckSlot check[2][kMaxRanks];
  /// Rows that each rank is about to send, if only the device has them: {rows : 40, epoch : 24}.
  alignas(128) uint64_t counts[2][kMaxRanks];
  /// CUDA, likewise: by rank, the number of the last trial whose grid was complete there.
  alignas(128) uint32_t met[kMaxRanks];
};

inline constexpr int kCountEpochBits = 24;

/// Places areas one after the other.
namespace detail {

struct Cursor {
  uint64_t at;
  constexpr uint64_t take(uint64_t bytes) {
    const uint64_t start = at;
    at = round_up<uint64_t>(at + bytes, 256);
    return start;
  }
};

constexpr uint64_t at_most(uint64_t a, uint64_t b) { return a < b ? a : b; }

}  // namespace detail

}  // namespace collx
