// The words of a region by which CPU ranks follow each other.
//
// MEMORY LAYOUT. Only the region's owner writes the words here (except Doorbell, on which
// peers note that they sleep). Peers poll the published words, each area's on its own line.
//
// MEMORY SEMANTICS. A word is published with release after the data that it announces and polled
// with acquire. Epochs count the uses of an area, wrap around, and pick the slot: epoch & 1. A use
// publishes every word of its area, since a word that stood still for 2^31 uses would look as if it
// lay ahead.
#pragma once

#include <atomic>
#include <cstdint>

#include "../protocol/call.h"
#include "../protocol/cpu_layout.h"
#include "futex_wait.h"

namespace collx::cpu {

/// Memory that ranks use together, with an epoch of its own.
enum class Area : uint8_t {
  oneshot_push,  // oneshot slots
  twoshot_push,  // twoshot slots
  pull,          // staging, results and counts
  end_barrier,   // no memory: no peer uses this rank's tensors any more
  count
};
inline constexpr size_t kAreas = static_cast<size_t>(Area::count);

/// How far the owner has come in the use that the word counts.
enum class Word : uint8_t {
  arrived,  // its data lies where peers read it
  reduced,  // its part of the result lies where peers read it
  count
};

struct alignas(64) Control {
  std::atomic<uint32_t> busy;  // a call of the owner is under way
  uint32_t epochs[kAreas];     // uses so far
  // The last use of which every peer's last word has been seen: mostly the last one.
  uint32_t settled[kAreas];
  Doorbell bell;  // ranks that wait for this rank sleep here
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

/// What the owner of a region sends to and expects from each rank, by parity of the use.
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

/// Sets every counter of a region that no call uses. Equal on all ranks.
void set_epochs(char* region, const CpuLayout& layout, uint32_t epoch);

}  // namespace collx::cpu
