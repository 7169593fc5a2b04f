// Parts of a region as ranges of bytes, and a search for overlapping ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace collx {

struct Range {
  std::string name;
  uint64_t start;
  uint64_t bytes;
};

/// Describes the first two ranges that share a byte, or a range that exceeds the region. Returns ""
/// if there are none.
inline std::string find_overlap(std::vector<Range> ranges, uint64_t total) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.start < b.start; });
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Range& range = ranges[i];
    const uint64_t end = range.start + range.bytes;
    const bool last = i + 1 == ranges.size();
    if (end > (last ? total : ranges[i + 1].start)) {
      return range.name + " reaches into " + (last ? "nothing" : ranges[i + 1].name);
    }
  }
  return "";
}

/// Payload sizes from too small for any call to unrealistically large.
inline constexpr uint64_t kPayloads[] = {0,         1,        4 << 10,    64 << 10,
                                         256 << 10, 1 << 20,  3333333,    (3 << 20) + 17,
                                         16 << 20,  96 << 20, 1ull << 30, 1ull << 40};

}  // namespace collx
