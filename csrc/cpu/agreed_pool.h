// Memory that all ranks hand out at the same places, although each rank gets its memory back in an
// order of its own: Python's garbage collector frees at any time.
//
// AGREEMENT  A rank's allocations have numbers. Allocation n of every rank is decided by the same
// function of the same values: the requests 0 to n, and what each rank had got back before it began
// allocation n - kPoolLag. What it gets back later does not count yet. So the places are equal, and
// a block is handed out again only when no rank uses it.
//
// WAIT       A rank decides allocation n when every peer has begun n - kPoolLag: then all that
// counts is known. With a lag of one, ranks need not meet at each allocation, and a size of which
// k blocks are in use at a time takes k + 1 blocks.
//
// PAGES      Each rank only writes its own page, and peers read it. A block's uses alternate
// between two words. Use u + 2 begins when all ranks, the reader among them, have given back use
// u + 1, so no rank still reads use u when its word is written again. An older value in a word
// is not larger than the number of the allocation that began the use.
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
inline constexpr uint64_t kPoolAlignment = 512;             // of places and sizes
inline constexpr uint64_t kPoolSegmentBytes = 16ull << 20;  // at least, if there is room

/// What a rank publishes to its peers, in memory that all ranks map. Initially zero.
struct alignas(64) PoolPage {
  static constexpr uint64_t kKept = 8;

  uint64_t begun;            // allocations
  uint64_t requests[kKept];  // a hash of the requests 0 to n, at n mod kKept
  /// By block and parity of its use: the allocations begun when the rank got it back.
  uint64_t given_back[kPoolBlocks][2];
};

/// One rank's view. Allocations are made by one thread at a time; any thread gives blocks back.
class AgreedPool {
 public:
  struct Place {
    uint32_t block;
    uint32_t segment;
    uint64_t offset;
    bool used_before;
  };

  /// `pages`: every rank's, as mapped here.
  AgreedPool(std::vector<PoolPage*> pages, int rank, uint64_t most_bytes);

  /// Begins an allocation; the peers see it. Blocks do not change between streams, since reuse is
  /// ordered after a block's earlier use only by the stream.
  void begin(uint64_t bytes, uint32_t stream);
  /// Whether the peer has begun all that counts for the allocation.
  bool may_decide(int peer) const;
  /// Whether the peer has made the same requests. Only when it may_decide().
  bool agrees(int peer) const;

  /// Where the allocation lies. Nothing: no segment has room. Only when all peers agree.
  std::optional<Place> place();
  /// Bytes of the segment that would give it room; 0: it would not fit into what is left.
  uint64_t wanted_segment() const;
  void add_segment(uint64_t bytes);
  void stop_growing() { most_bytes_ = 0; }

  void give_back(uint32_t block);

 private:
  struct Block {
    uint32_t segment;
    uint64_t offset;
    uint64_t number;  // of the allocation that has, or had it last
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

  // The allocation that is being made.
  uint64_t number_ = 0;
  uint64_t bytes_ = 0;
  uint32_t stream_ = 0;
  uint64_t hash_ = 0;
  std::array<uint64_t, PoolPage::kKept> requests_{};

  std::mutex mutex_;  // of what give_back() reads
  std::vector<Block> blocks_;
  uint64_t begun_ = 0;
};

}  // namespace collx::cpu
