#include "host_status.h"

#include <mutex>
#include <vector>

#if COLLX_CUDA
#include "../cuda/device.h"
#endif

namespace collx {

namespace {

struct Pool {
  std::mutex mutex;
  std::vector<HostStatus*> free;
};

Pool& pool() {
  static Pool* const made = new Pool;  // never destroyed: may be used at any point during exit
  return *made;
}

HostStatus* take_pinned() {
  {
    std::lock_guard lock(pool().mutex);
    if (!pool().free.empty()) {
      HostStatus* status = pool().free.back();
      pool().free.pop_back();
      *status = HostStatus{};
      return status;
    }
  }
#if COLLX_CUDA
  return cuda::allocate_status();
#else
  return nullptr;
#endif
}

}  // namespace

StatusBlock::StatusBlock(bool shared_with_kernels)
    : pinned_(shared_with_kernels),
      status_(shared_with_kernels ? take_pinned() : new HostStatus{}) {}

StatusBlock::~StatusBlock() {
  if (!pinned_) delete status_;
}

void StatusBlock::give_back() {
  if (!pinned_ || given_back_) return;
  given_back_ = true;
  std::lock_guard lock(pool().mutex);
  pool().free.push_back(status_);
}

}  // namespace collx
