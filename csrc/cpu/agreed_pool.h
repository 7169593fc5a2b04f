// Memory that all ranks hand out at the same places, although each rank gets its memory back in a
// different order: Python's garbage collector may free a tensor at any time.
//
// AGREEMENT  A rank's allocations are numbered. Every rank decides allocation n by the same
// function of the same values: the requests 0 to n, and the blocks that each rank had got back
// before it began allocation n - kPoolLag. Blocks that it gets back later do not count yet.
// Therefore the places are equal, and a block is handed out again only when no rank uses it.
//
// WAIT       A rank decides allocation n when every peer has begun n - kPoolLag. Then all these
// values are known. With a lag of one, ranks need not synchronize at each allocation. If k blocks
// of a size are in use at a time, k + 1 blocks of that size suffice.
//
// PAGES      Each rank writes only its own page, and peers read it. The uses of a block alternate
// between two words. Use u + 2 begins after all ranks, including the reader, have given back use
// u + 1. Therefore no rank still reads the word of use u when it is written again. An older value
// in a word is not larger than the number of the allocation that began the use.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace collx::cpu {

inline constexpr uint64_t kPoolLag = 1;
inline constexpr uint32_t kPoolBlocks = 4096;               // at most
inline constexpr uint64_t kPoolAlignment = 512;             // of offsets and sizes
inline constexpr uint64_t kPoolSegmentBytes = 16ull << 20;  // at least, if there is space

/// The words that a rank publishes to its peers, in memory that all ranks map. Initially zero.
struct alignas(64) PoolPage {
  static constexpr uint64_t kKept = 8;

  uint64_t begun;            // allocations
  uint64_t requests[kKept];  // a hash of the requests 0 to n, at n mod kKept
  /// For each block and parity of its use: the number of allocations begun when the rank got it
  /// back.
  uint64_t given_back[kPoolBlocks][2];
};

/// The pool as one rank sees it. One thread at a time makes allocations. Any thread may give blocks
/// back.
class AgreedPool {
 public:
  struct Place {
    uint32_t block;
    uint32_t segment;
    uint64_t offset;
    bool used_before;
  };

  /// `pages`: the pages of all ranks, as mapped in this process.
  AgreedPool(std::vector<PoolPage*> pages, int rank, uint64_t most_bytes);

  /// Begins an allocation and publishes it to the peers. A block stays with its stream, since only
  /// the stream orders its reuse after its earlier use.
  void begin(uint64_t bytes, uint32_t stream);
  /// Whether the peer has begun the allocations that this decision depends on.
  bool may_decide(int peer) const;
  /// Whether the peer has made the same requests. Call it only after may_decide() has returned
  /// true.
  bool agrees(int peer) const;

  /// The location of the allocation, or nothing if no segment has space. Call it only if all peers
  /// agree.
  std::optional<Place> place();
  /// The size of a new segment that would have space for the allocation; 0 if it would exceed the
  /// limit.
  uint64_t wanted_segment() const;
  void add_segment(uint64_t bytes);
  void stop_growing() { most_bytes_ = 0; }

  void give_back(uint32_t block);

 private:
  struct Block {
    uint32_t segment;
    uint64_t offset;
    uint64_t number;  // of the allocation that uses it now, or used it last
    uint64_t uses;
  };
  struct Segment {
    uint64_t bytes;
    uint64_t used;
  };

  bool is_free(const Block& block) const;
  Place take(uint32_t block);

  const std::vector<PoolPage*> pages_;
  PoolPage& own_;
  uint64_t most_bytes_;
  uint64_t all_bytes_ = 0;  // of the segments
  std::vector<Segment> segments_;
  std::map<std::pair<uint32_t, uint64_t>, std::vector<uint32_t>> sizes_;  // {stream, bytes}: blocks

  // The current allocation.
  uint64_t number_ = 0;
  uint64_t bytes_ = 0;
  uint32_t stream_ = 0;
  uint64_t hash_ = 0;
  std::array<uint64_t, PoolPage::kKept> requests_{};

  std::mutex mutex_;  // guards the data that give_back() reads
  std::vector<Block> blocks_;
  uint64_t begun_ = 0;
};

}  // namespace collx::cpu
