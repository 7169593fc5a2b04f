// The words of a region by which CPU ranks synchronize.
//
// MEMORY LAYOUT. Only the region's owner writes the words here, except Doorbell, in which peers
// register that they sleep. Peers poll the published words. Those of each area have a separate
// cache line.
//
// MEMORY SEMANTICS. A word is published with release after the data that it announces, and is
// polled with acquire. Epochs count the uses of an area, wrap around, and select the slot:
// epoch & 1. A use publishes every word of its area, since a word that did not change for 2^31 uses
// would seem to be ahead.
// lay ahead.
#pragma once

#include <atomic>
#include <cstdint>

#include "../protocol/call.h"
#include "../protocol/cpu_layout.h"
#include "futex_wait.h"

namespace collx::cpu {

/// Memory that ranks use together. Each area has its own epoch.
enum class Area : uint8_t {
  oneshot_push,  // oneshot slots
  twoshot_push,  // twoshot slots
  pull,          // staging, results and counts
  end_barrier,   // no memory: no peer still uses this rank's tensors
  count
};
inline constexpr size_t kAreas = static_cast<size_t>(Area::count);

/// The owner's progress in the use that the word counts.
enum class Word : uint8_t {
  arrived,  // its data is where peers read it
  reduced,  // its part of the result is where peers read it
  count
};

struct alignas(64) Control {
  std::atomic<uint32_t> busy;  // a call of the owner is in progress
  uint32_t epochs[kAreas];     // uses so far
  // The last use for which every peer's last word has been seen: usually the last one.
  uint32_t settled[kAreas];
  Doorbell bell;  // ranks that wait for this rank sleep on it
};
static_assert(sizeof(Control) <= kCpuControlBytes);

struct alignas(64) Published {
  std::atomic<uint32_t> words[static_cast<size_t>(Word::count)];
};
static_assert(kAreas * sizeof(Published) <= kCpuFlagBytes);

inline Control& control_of(char* region, const CpuLayout& layout) {
  return *reinterpret_cast<Control*>(region + layout.control);
}

inline std::atomic<uint32_t>& published(char* region, const CpuLayout& layout, Area area,
                                        Word word) {
  auto* lines = reinterpret_cast<Published*>(region + layout.published);
  return lines[static_cast<size_t>(area)].words[static_cast<size_t>(word)];
}

/// The bytes that the owner of a region sends to and expects from each rank, by parity of the use.
struct Counts {
  uint64_t* sends;  // [kMaxRanks]
  uint64_t* expects;
};

inline Counts counts_of(char* region, const CpuLayout& layout, uint32_t parity) {
  const auto row = [&](uint64_t offset) {
    return reinterpret_cast<uint64_t*>(region + offset) + parity * kMaxRanks;
  };
  return {row(layout.sends), row(layout.expects)};
}

/// Sets every counter of a region that no call uses. The epoch must be equal on all ranks.
void set_epochs(char* region, const CpuLayout& layout, uint32_t epoch);

}  // namespace collx::cpu
