#include "region.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "control.h"

namespace collx::cpu {

CpuLayout layout(int world, uint64_t payload_bytes) {
  if (world < 1 || world > kMaxCpuRanks) {
    throw std::invalid_argument("world size " + std::to_string(world) + ": from 1 to " +
                                std::to_string(kMaxCpuRanks) + " ranks are accepted on CPU");
  }
  const CpuLayout layout = cpu_layout(world, payload_bytes);
  if (layout.total_bytes > payload_bytes) {
    throw std::invalid_argument("payload_bytes " + std::to_string(payload_bytes) + ": at least " +
                                std::to_string(smallest_cpu_region(world)) +
                                " bytes are needed for " + std::to_string(world) + " ranks on CPU");
  }
  return layout;
}

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
