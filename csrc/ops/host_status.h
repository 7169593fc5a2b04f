// The block of host memory in which a communicator's kernels record a failure.
#pragma once

#include <c10/core/Device.h>

#include "../protocol/status.h"

namespace collx {

/// LIFETIME  A kernel in flight may still write the block when its communicator is destroyed, and
/// freeing pinned memory would wait for that kernel. So CUDA blocks are never freed. give_back()
/// keeps a block for the next communicator; the owner must ensure that nothing writes to it any
/// more. Any other block is leaked (one small allocation for each failed communicator).
class StatusBlock {
 public:
  /// `shared_with_kernels`: kernels write to the block, so it must be pinned memory.
  explicit StatusBlock(bool shared_with_kernels);
  ~StatusBlock();
  StatusBlock(const StatusBlock&) = delete;
  StatusBlock& operator=(const StatusBlock&) = delete;

  HostStatus* get() const { return status_; }
  bool ready() const { return is_recorded(*status_); }
  void give_back();

 private:
  bool pinned_;
  bool given_back_ = false;
  HostStatus* status_;
};

}  // namespace collx
