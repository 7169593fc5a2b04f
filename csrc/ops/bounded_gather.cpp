#include "bounded_gather.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "errors.h"

namespace collx {

BoundedGather::BoundedGather(Communicator& communicator, const char* op,
                             const CallDescriptor& descriptor)
    : communicator_(communicator),
      op_(op),
      descriptor_(descriptor),
      group_(c10d::resolve_process_group(communicator.options().group_name)),
      timeout_(communicator.options().timeout_ms) {
  const c10::DeviceType device = communicator.options().device.type();
  const bool direct = serves(device);
  through_cpu_ = device == c10::DeviceType::CPU || !direct ||
                 group_->getBackend(device)->getBackendName() == "gloo";
  TORCH_CHECK_NOT_IMPLEMENTED(!through_cpu_ || serves(c10::DeviceType::CPU), "collx.", op,
                              ": algorithm: \"fallback\" needs a process group that serves ",
                              device, " or cpu; group \"", communicator.options().group_name,
                              "\" serves neither");
}

at::Tensor BoundedGather::operator()(at::Tensor bytes) {
  const int64_t world = communicator_.options().world_size;
  at::Tensor gathered = at::empty({world * bytes.numel()}, bytes.options());
  try {
    c10d::AllgatherOptions options;
    // gloo ends what we gave up on; NCCL would end the process, so it keeps its own limit.
    if (through_cpu_) options.timeout = timeout_;
    const auto deadline = Clock::now() + timeout_;
    const auto work = group_->_allgather_base(gathered, bytes, options);
    if (!completes(*work, deadline)) fail("");
    work->wait();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::runtime_error& error) {
    fail(error.what());
  }
  return gathered;
}

bool BoundedGather::serves(c10::DeviceType device) const {
  for (const c10::Device& served : group_->getDeviceTypes()) {
    if (served.type() == device) return true;
  }
  return false;
}

bool BoundedGather::completes(c10d::Work& work, Clock::time_point deadline) {
  const auto impatient = Clock::now() + std::chrono::microseconds(100);
  while (!work.isCompleted()) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    if (now < impatient) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

void BoundedGather::fail(const std::string& reason) {
  StatusRecord record;
  record.failure = Failure::timeout;
  record.phase = Phase::fallback;
  record.rank = communicator_.options().rank;
  record.sequence = communicator_.calls();
  record.own = descriptor_;
  communicator_.report(record);
  communicator_.check(op_, reason.empty() ? "" : "; the process group says: " + reason);
  TORCH_INTERNAL_ASSERT(false, "a reported failure was not recorded");
}

void BoundedGather::compare_descriptors() {
  const CallDescriptor& own = descriptor_;
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &own, sizeof(own));
  if (!through_cpu_) bytes = bytes.to(communicator_.options().device);
  const at::Tensor all = (*this)(bytes).cpu();
  for (int rank = 0; rank < communicator_.options().world_size; ++rank) {
    CallDescriptor other;
    std::memcpy(&other, static_cast<const char*>(all.const_data_ptr()) + rank * sizeof(other),
                sizeof(other));
    if (fingerprint(other) == fingerprint(own)) continue;
    StatusRecord record;
    record.failure = Failure::mismatch;
    record.phase = Phase::check;
    record.rank = communicator_.options().rank;
    record.peer = rank;
    record.sequence = communicator_.calls();
    record.expected = fingerprint(own);
    record.seen = fingerprint(other);
    record.own = own;
    record.other = other;
    communicator_.report(record);
    communicator_.check(op_);
  }
}

}  // namespace collx
