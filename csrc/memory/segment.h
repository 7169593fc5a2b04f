// Shared memory without a name: a memfd, mapped here and, through its descriptor, by the peers.
//
// The kernel frees the pages when the last descriptor and mapping are gone, regardless of how the
// processes ended. So nothing can be left behind, and the size of /dev/shm is no limit (hazard 22).
//
// LIFETIME. A segment is page-aligned and zero-filled, and uses memory only for pages that are
// accessed. Its size is sealed: if a rank could shrink it, another rank that maps it would receive
// SIGBUS.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "unique_fd.h"

namespace collx::memory {

class Segment {
 public:
  /// Creates a segment of at least `bytes` bytes. `label` appears in /proc/self/maps only. Throws
  /// std::system_error.
  static Segment create(size_t bytes, const char* label);

  /// Maps a peer's segment and closes the descriptor. Throws std::runtime_error if it is not a
  /// sealed segment of `bytes` bytes, and std::system_error if it cannot be mapped.
  static Segment map(UniqueFd fd, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  /// The descriptor of a segment that was created here; -1 for a peer's, or after close_fd().
  int fd() const { return fd_.get(); }
  /// Call this when no further rank will receive the segment. The memory stays mapped.
  void close_fd() { fd_ = UniqueFd(); }

 private:
  Segment(UniqueFd fd, std::byte* data, size_t mapped_bytes)
      : fd_(std::move(fd)), data_(data), mapped_bytes_(mapped_bytes) {}

  UniqueFd fd_;
  std::byte* data_;
  size_t mapped_bytes_;
};

}  // namespace collx::memory
