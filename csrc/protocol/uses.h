// Divides the vectors of a call into uses of the memory that carries them. This is plain
// arithmetic, so that tests can run it on the host.
#pragma once

#include "cuda_layout.h"
#include "types.h"

namespace collx {

/// Iterates over uses. All are full except the last. Without vectors there is no use.
class Uses {
 public:
  COLLX_HD constexpr Uses(uint64_t vectors, uint64_t capacity)
      : vectors_(vectors), capacity_(capacity) {}

  /// Whether there is a current use. The other functions describe it.
  COLLX_HD constexpr bool any() const { return first_ < vectors_; }
  COLLX_HD constexpr uint64_t first() const { return first_; }  // its first vector
  COLLX_HD constexpr uint64_t count() const {
    const uint64_t left = vectors_ - first_;
    return left < capacity_ ? left : capacity_;
  }
  COLLX_HD constexpr uint32_t number() const { return number_; }  // uses before it
  /// The total number of uses.
  COLLX_HD constexpr uint32_t all() const {
    if (vectors_ <= capacity_) return vectors_ > 0 ? 1 : 0;
    return static_cast<uint32_t>(ceil_div(vectors_, capacity_));
  }
  COLLX_HD constexpr void next() {
    first_ += count();
    ++number_;
  }

 private:
  uint64_t vectors_;
  uint64_t capacity_;
  uint64_t first_ = 0;
  uint32_t number_ = 0;
};

/// Bytes of the largest chunk in slots of `slot_bytes`. Chunks of a reducescatter are smaller than
/// a slot, because the last chunk is reduced only after all data has arrived. Chunks that other
/// ranks pass on are smaller, because they do so only after a whole chunk has arrived.
COLLX_HD constexpr uint32_t largest_chunk(Collective collective, Algorithm algorithm,
                                          uint32_t slot_bytes) {
  constexpr uint32_t kReduced = 24 << 10, kPassedOn = 8 << 10;
  const uint32_t most = algorithm == Algorithm::broadcast_lanes   ? kPassedOn
                        : collective == Collective::reducescatter ? kReduced
                                                                  : slot_bytes;
  return most < slot_bytes ? most : slot_bytes;
}

/// The distribution of a message over lanes: chunks of equal size, which the lanes take in turn.
struct LaneChunks {
  uint32_t count;    // in each lane
  uint32_t vectors;  // of each chunk; a whole number of lines of 128 bytes

  LaneChunks() = default;
  COLLX_HD constexpr LaneChunks(uint64_t all, int lanes, uint32_t slot_vectors)
      : count(0), vectors(0) {
    const uint64_t share = ceil_div(all, static_cast<uint64_t>(lanes));
    if (share == 0) return;
    const uint64_t chunks = ceil_div(share, uint64_t{slot_vectors});
    count = static_cast<uint32_t>(chunks);
    vectors =
        static_cast<uint32_t>(round_up(ceil_div(share, chunks), uint64_t{128 / kVectorBytes}));
  }
};

}  // namespace collx
