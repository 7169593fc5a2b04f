#include "fallback.h"

#include <ATen/ops/empty.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "../cpu/allreduce.h"
#include "communicator.h"
#include "errors.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAStream.h>

#include "../cuda/allreduce.h"
#endif

namespace collx {

namespace {

using Clock = std::chrono::steady_clock;

/// Gathers through the process group with waits that are bounded here: what a backend does on its
/// own time-out differs (NCCL's wait does not even block the host).
class BoundedGather {
 public:
  BoundedGather(Communicator& communicator, const char* op, const CallDescriptor& descriptor)
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

  /// Whether gathered bytes arrive in CPU memory.
  bool through_cpu() const { return through_cpu_; }

  /// uint8 [n], on the device or in CPU memory as through_cpu() says -> uint8 [world * n].
  at::Tensor operator()(at::Tensor bytes) {
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

 private:
  bool serves(c10::DeviceType device) const {
    for (const c10::Device& served : group_->getDeviceTypes()) {
      if (served.type() == device) return true;
    }
    return false;
  }

  static bool completes(c10d::Work& work, Clock::time_point deadline) {
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

  [[noreturn]] void fail(const std::string& reason) {
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

  Communicator& communicator_;
  const char* op_;
  const CallDescriptor& descriptor_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::chrono::milliseconds timeout_;
  bool through_cpu_;
};

/// Checked mode without regions: the descriptors themselves are gathered and compared.
void compare_descriptors(Communicator& communicator, const char* op, const CallDescriptor& own,
                         BoundedGather& gather) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &own, sizeof(own));
  if (!gather.through_cpu()) bytes = bytes.to(communicator.options().device);
  const at::Tensor all = gather(bytes).cpu();
  for (int rank = 0; rank < communicator.options().world_size; ++rank) {
    CallDescriptor other;
    std::memcpy(&other, static_cast<const char*>(all.const_data_ptr()) + rank * sizeof(other),
                sizeof(other));
    if (fingerprint(other) == fingerprint(own)) continue;
    StatusRecord record;
    record.failure = Failure::mismatch;
    record.phase = Phase::check;
    record.rank = communicator.options().rank;
    record.peer = rank;
    record.sequence = communicator.calls();
    record.expected = fingerprint(own);
    record.seen = fingerprint(other);
    record.own = own;
    record.other = other;
    communicator.report(record);
    communicator.check(op);
  }
}

void reduce_rows(const Communicator& communicator, const AllreduceCall& call,
                 const at::Tensor& gathered, at::Tensor& output, uint64_t numel) {
  const int world = communicator.options().world_size;
  const uint64_t bytes = numel * static_cast<uint64_t>(dtype_size(call.dtype));
  std::array<const void*, kMaxRanks> rows{};
  for (int rank = 0; rank < world; ++rank) {
    rows[static_cast<size_t>(rank)] =
        static_cast<const char*>(gathered.const_data_ptr()) + static_cast<uint64_t>(rank) * bytes;
  }
  void* to = output.mutable_data_ptr();
  if (gathered.is_cpu()) {
    cpu::reduce(rows.data(), world, to, numel, call.dtype, call.reduce_op);
  } else {
#if COLLX_CUDA
    cuda::reduce(rows.data(), world, to, numel, call.dtype, call.reduce_op,
                 c10::cuda::getCurrentCUDAStream(gathered.device().index()).stream());
#endif
  }
}

}  // namespace

void fallback_allreduce(Communicator& communicator, const char* op, const AllreduceCall& call,
                        const at::Tensor& input, const at::Tensor& output) {
  BoundedGather gather(communicator, op, call.descriptor);
  if (communicator.options().check && !communicator.has_regions()) {
    compare_descriptors(communicator, op, call.descriptor, gather);
  }
  const at::Tensor from = input.view(-1);
  const at::Tensor to = output.view(-1);
  const auto element = static_cast<uint64_t>(dtype_size(call.dtype));
  const auto step = static_cast<int64_t>(
      fallback_chunk_bytes(communicator.options().world_size, call.dtype) / element);
  for (int64_t start = 0; start < from.numel(); start += step) {
    const int64_t count = std::min(step, from.numel() - start);
    at::Tensor bytes = from.narrow(0, start, count).view(at::kByte);
    if (gather.through_cpu()) bytes = bytes.cpu();
    const at::Tensor gathered = gather(bytes);
    at::Tensor part = to.narrow(0, start, count);
    at::Tensor reduced = gathered.device() == part.device()
                             ? part
                             : at::empty({count}, part.options().device(gathered.device()));
    reduce_rows(communicator, call, gathered, reduced, static_cast<uint64_t>(count));
    if (!reduced.is_same(part)) part.copy_(reduced);
  }
}

}  // namespace collx
