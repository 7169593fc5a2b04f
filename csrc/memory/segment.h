// Shared memory without a name: a memfd, mapped here and, through its descriptor, by the peers.
//
// The kernel frees the pages when the last descriptor and mapping are gone, however the processes
// ended, so nothing can be left behind; and a small /dev/shm is no limit (hazard 22).
//
// LIFETIME. A segment is page aligned, zero-filled, and takes memory only where it is touched. Its
// size is sealed: no rank can shrink what another has mapped, which would end in SIGBUS.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "unique_fd.h"

namespace collx::memory {

class Segment {
 public:
  /// A new segment of at least `bytes` bytes; `label` shows in /proc/self/maps, and names nothing.
  /// Throws std::system_error.
  static Segment create(size_t bytes, const char* label);

  /// Maps a peer's segment and closes the descriptor. Throws std::runtime_error when it is not a
  /// sealed segment of `bytes` bytes, std::system_error when it cannot be mapped.
  static Segment map(UniqueFd fd, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  /// Of a segment made here; -1 of a peer's, or after close_fd().
  int fd() const { return fd_.get(); }
  /// Call it when no further rank receives the segment. The memory stays.
  void close_fd() { fd_ = UniqueFd(); }

 private:
  Segment(UniqueFd fd, std::byte* data, size_t mapped_bytes)
      : fd_(std::move(fd)), data_(data), mapped_bytes_(mapped_bytes) {}

  UniqueFd fd_;
  std::byte* data_;
  size_t mapped_bytes_;
};

}  // namespace collx::memory
