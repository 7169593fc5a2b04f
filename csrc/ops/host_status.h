// The block of host memory in which a communicator's kernels leave their failure.
#pragma once

#include <c10/core/Device.h>

#include "../protocol/status.h"

namespace collx {

/// LIFETIME  A kernel in flight may still write the block when its communicator goes, and freeing
/// pinned memory would wait for that kernel. So CUDA blocks are never freed: give_back() keeps
/// them for the next communicator, once its owner has ensured that nothing writes any more; a block
/// that is dropped otherwise stays where it is (one small allocation for each failed communicator).
class StatusBlock {
 public:
  /// `shared_with_kernels`: kernels write it, so it has to be pinned memory.
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
