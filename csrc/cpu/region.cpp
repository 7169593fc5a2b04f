#include <cstring>

#include "calls.h"
#include "control.h"

namespace collx::cpu {

void set_epochs(char* region, const CpuLayout& layout, uint32_t epoch) {
  for (size_t c = 0; c < kAreas; ++c) {
    control_of(region, layout).epochs[c] = epoch;
    control_of(region, layout).settled[c] = epoch;
    for (size_t w = 0; w < static_cast<size_t>(Word::count); ++w) {
      published(region, layout, static_cast<Area>(c), static_cast<Word>(w)).store(epoch);
    }
  }
  auto& header = *reinterpret_cast<RegionHeader*>(region);
  header.check_epoch = epoch;
  for (auto& parity : header.check) {
    for (CheckSlot& slot : parity) slot.flag = static_cast<uint64_t>(epoch) << 32;
  }
}

void initialize(char* region, const CpuLayout& layout) {
  // This touches every page, so that no call causes page faults.
  std::memset(region, 0, layout.total_bytes);
  set_epochs(region, layout, 0);
}

}  // namespace collx::cpu
