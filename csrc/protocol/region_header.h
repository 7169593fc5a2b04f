// The symmetric region that each rank owns, one per communicator: a header, which both kinds of
// devices share, followed by the areas of cuda_layout.h or cpu_layout.h.
#pragma once

#include "status.h"
#include "types.h"

namespace collx {

inline constexpr uint64_t kDefaultPayloadBytes = 128ull << 20;

/// Mailbox of one rank for checked mode. That rank writes it; the region's owner reads it.
struct alignas(128) CheckSlot {
  CallDescriptor descriptor;
  uint64_t flag;  // {epoch : high 32, fingerprint : low 32}; a release store after `descriptor`
};

/// Where a message begins in the receiver's output. The receiver writes it; the sender, which owns
/// the region, reads it.
struct Destination {
  uint64_t offset;  // in bytes
  uint64_t flag;  // {epoch : high 32, fingerprint of the call and of the pair's two messages : low
                  // 32}; a release store after `offset`
};

struct alignas(128) RegionHeader {
  /// 0, or 1 + the rank that failed first. Any rank writes it; every wait reads it.
  alignas(128) uint32_t poison;
  /// Words that only the owner uses, on a separate cache line.
  alignas(128) uint32_t claimed;  // CUDA: set by the thread that writes HostStatus::by_kernel
  uint32_t check_epoch;           // advanced by the last block of a checked call
  uint32_t check_blocks;          // blocks of this call that have passed the check
  uint32_t counts_epoch;          // like check_epoch, for the exchange of counts
  uint32_t counts_blocks;         // like check_blocks, for the exchange of counts
  uint32_t destinations_epoch;    // the same for the exchange of destinations
  uint32_t destinations_blocks;
  uint32_t noted;     // CUDA: set by the first thread that fails, which then writes the note
  uint64_t sequence;  // calls completed
  // CUDA, while init measures how many blocks are resident at once: blocks of the grid that have
  // started, and a bit for each trial in which a block did not see the grids of all ranks complete.
  uint32_t started;
  uint32_t unmet;
  /// Notes of the ranks that failed, by rank. The first rank to fail writes its note before it sets
  /// `poison`.
  Note inbox[kMaxRanks];
  /// Two slots per rank, so that a fast rank's next call does not overwrite data that is still
  /// read.
  CheckSlot check[2][kMaxRanks];
  /// Rows that each rank will send, for counts that only the device knows: {rows : 40, epoch : 24}.
  alignas(128) uint64_t counts[2][kMaxRanks];
  /// CUDA, by receiver, for messages whose place in the output only the receiver knows.
  Destination destinations[2][kMaxRanks];
  /// CUDA, during the same measurement: by rank, the number of the last trial whose grid was
  /// complete there.
  alignas(128) uint32_t met[kMaxRanks];
};

inline constexpr int kCountEpochBits = 24;

/// Places areas in sequence.
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
