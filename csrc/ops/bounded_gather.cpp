#include "bounded_gather.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "errors.h"
#include "torch_version.h"

namespace collx {

namespace {

c10::intrusive_ptr<c10d::ProcessGroup> group_of(const CommunicatorOptions& o) {
  if (!o.fallback_group) return c10d::resolve_process_group(o.group_name);
  return c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(o.fallback_group);
}

}  // namespace

BoundedGather::BoundedGather(Communicator& communicator, const char* op,
                             const CallDescriptor& descriptor)
    : communicator_(communicator),
      op_(op),
      descriptor_(descriptor),
      group_(group_of(communicator.options())),
      timeout_(communicator.timeout()) {
  const c10::DeviceType device = communicator.options().device.type();
  const bool direct = serves(device);
  through_cpu_ = device == c10::DeviceType::CPU || !direct ||
                 group_->getBackend(device)->getBackendName() == "gloo";
  TORCH_CHECK_NOT_IMPLEMENTED(!through_cpu_ || serves(c10::DeviceType::CPU), "collx.", op,
                              ": algorithm: \"fallback\" needs a process group that serves ",
                              device, " or cpu; group \"", communicator.options().group_name,
                              "\" serves neither");
  // Kernels compare the descriptors of ranks with regions.
  if (communicator.options().check && !communicator.has_regions()) compare_descriptors();
}

BoundedGather::~BoundedGather() = default;

at::Tensor BoundedGather::operator()(at::Tensor bytes) {
  const int64_t world = communicator_.options().world_size;
  bytes = bytes.to(through_cpu_ ? c10::Device(at::kCPU) : communicator_.options().device);
  at::Tensor gathered = at::empty({world * bytes.numel()}, bytes.options());
  const auto deadline = Clock::now() + timeout_;
  bool complete = false;
  try {
    c10d::AllgatherOptions options;
    // gloo cancels the operation after this timeout. NCCL would end the process, so it keeps its
    // own timeout.
    if (through_cpu_) options.timeout = timeout_;
    const auto work = all_gather(*group_, gathered, bytes, options);
    complete = completes(*work, deadline);
    if (complete) work->wait();
  } catch (c10::Error& error) {
    error.add_context(give_up(deadline, error.what_without_backtrace()));
    throw;
  } catch (const std::runtime_error& error) {  // gloo's own errors, which do not name the call
    const std::string where = give_up(deadline, error.what());
    C10_THROW_ERROR(DistBackendError, where + ": " + error.what());
  } catch (...) {  // errors of Python
    give_up(deadline, "");
    throw;
  }
  if (!complete) give_up(deadline, "");
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

std::string BoundedGather::give_up(Clock::time_point deadline, const std::string& cause) {
  const std::string detail = cause.empty() ? "" : "; the process group says: " + cause;
  communicator_.check(op_, detail);  // a peer may have reported the cause
  const bool late = Clock::now() >= deadline;
  StatusRecord record =
      communicator_.begin_record(late ? Failure::timeout : Failure::group, Phase::fallback);
  record.own = descriptor_;
  communicator_.report(record);
  if (late) communicator_.check(op_, detail);
  return "collx." + std::string(op_) + ": communicator \"" + communicator_.options().name +
         "\" has failed on rank " + std::to_string(record.rank) +
         ": the process group raised an exception in phase " + std::string(name_of(record.phase)) +
         " of " + describe(record.own);
}

void BoundedGather::compare_descriptors() {
  const CallDescriptor& own = descriptor_;
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &own, sizeof(own));
  const at::Tensor all = (*this)(bytes).cpu();
  for (int rank = 0; rank < communicator_.options().world_size; ++rank) {
    CallDescriptor other;
    std::memcpy(&other, static_cast<const char*>(all.const_data_ptr()) + rank * sizeof(other),
                sizeof(other));
    if (fingerprint(other) == fingerprint(own)) continue;
    StatusRecord record = communicator_.begin_record(Failure::mismatch, Phase::check);
    record.peer = rank;
    record.expected = fingerprint(own);
    record.seen = fingerprint(other);
    record.own = own;
    record.other = other;
    communicator_.report(record);
    communicator_.check(op_);
  }
}

}  // namespace collx
