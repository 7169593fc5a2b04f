#include "symmetric_memory.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "interpreter_lock.h"

namespace collx::memory {
namespace {

constexpr size_t kDefaultTimeoutMs = 30'000;
constexpr size_t kLongestTimeoutMs = size_t{1} << 40;  // prevents overflow of a deadline

size_t effective_timeout(size_t timeout_ms) {
  return timeout_ms == 0 ? kDefaultTimeoutMs : std::min(timeout_ms, kLongestTimeoutMs);
}

Deadline deadline_after(size_t timeout_ms) {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(effective_timeout(timeout_ms));
}

size_t words_bytes(size_t pad_bytes) {
  constexpr size_t line = alignof(cpu::Doorbell);
  return (pad_bytes + line - 1) / line * line;
}

// If there are more ranks than cores, a rank that spins only prevents another rank from running.
cpu::Spinning patience_of(int world) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return world <= cores ? cpu::Spinning{} : cpu::Spinning{20, 20};
}

}  // namespace

size_t pad_segment_bytes(size_t pad_bytes) {
  return words_bytes(pad_bytes) + sizeof(cpu::Doorbell);
}

CpuSymmetricMemory::CpuSymmetricMemory(std::shared_ptr<RankMappings> mappings, size_t offset)
    : mappings_(std::move(mappings)), offset_(offset), patience_(patience_of(mappings_->world)) {}

void CpuSymmetricMemory::check_usable(const char* call) const {
  TORCH_CHECK(mappings_->owner == ::getpid(), "SymmetricMemory.", call,
              ": this handle was made by process ", mappings_->owner,
              " and cannot be used in its forked child ", ::getpid());
}

void CpuSymmetricMemory::check_signal(const char* call, int peer, int channel) const {
  check_usable(call);
  const int world = mappings_->world;
  TORCH_CHECK_VALUE(0 <= peer && peer < world, "SymmetricMemory.", call, ": rank ", peer,
                    " given, group '", mappings_->group, "' has ranks 0 to ", world - 1);
  const auto channels =
      static_cast<int64_t>(mappings_->pad_bytes / sizeof(uint32_t) / static_cast<size_t>(world));
  TORCH_CHECK_VALUE(0 <= channel && channel < channels, "SymmetricMemory.", call, ": channel ",
                    channel, " given, a signal pad of ", mappings_->pad_bytes, " bytes has ",
                    channels, " channels for ", world, " ranks");
}

uint32_t* CpuSymmetricMemory::word(int owner, int channel, int source) const {
  auto* words = static_cast<uint32_t*>(mappings_->pads[static_cast<size_t>(owner)]);
  return words + static_cast<ptrdiff_t>(channel) * mappings_->world + source;
}

cpu::Doorbell& CpuSymmetricMemory::doorbell(int owner) const {
  auto* pad = static_cast<std::byte*>(mappings_->pads[static_cast<size_t>(owner)]);
  return *reinterpret_cast<cpu::Doorbell*>(pad + words_bytes(mappings_->pad_bytes));
}

bool CpuSymmetricMemory::put(int peer, int channel, Deadline deadline) {
  std::atomic_ref<uint32_t> signal(*word(peer, channel, mappings_->rank));
  const auto ready = [&] {
    uint32_t expected = 0;
    return signal.compare_exchange_strong(expected, 1, std::memory_order_acq_rel,
                                          std::memory_order_relaxed);
  };
  if (!cpu::wait_until(doorbell(peer), ready, deadline, patience_)) return false;
  cpu::ring(doorbell(peer));
  return true;
}

bool CpuSymmetricMemory::take(int peer, int channel, Deadline deadline) {
  const int rank = mappings_->rank;
  std::atomic_ref<uint32_t> signal(*word(rank, channel, peer));
  const auto ready = [&] {
    uint32_t expected = 1;
    return signal.compare_exchange_strong(expected, 0, std::memory_order_acq_rel,
                                          std::memory_order_relaxed);
  };
  if (!cpu::wait_until(doorbell(rank), ready, deadline, patience_)) return false;
  cpu::ring(doorbell(rank));  // the peer's next put may sleep until the word is free
  return true;
}

void CpuSymmetricMemory::throw_timeout(const char* call, const char* what, int peer, int channel,
                                       size_t timeout_ms) const {
  TORCH_CHECK(false, "SymmetricMemory.", call, ": rank ", mappings_->rank, " of group '",
              mappings_->group, "' timed out after ", effective_timeout(timeout_ms),
              " ms on channel ", channel, " waiting for rank ", peer, " ", what);
}

void CpuSymmetricMemory::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  check_signal("put_signal", dst_rank, channel);
  const WithoutInterpreterLock unlocked;
  if (put(dst_rank, channel, deadline_after(timeout_ms))) return;
  throw_timeout("put_signal", "to take the previous signal", dst_rank, channel, timeout_ms);
}

void CpuSymmetricMemory::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  check_signal("wait_signal", src_rank, channel);
  const WithoutInterpreterLock unlocked;
  if (take(src_rank, channel, deadline_after(timeout_ms))) return;
  throw_timeout("wait_signal", "to signal", src_rank, channel, timeout_ms);
}

void CpuSymmetricMemory::barrier(int channel, size_t timeout_ms) {
  check_signal("barrier", mappings_->rank, channel);
  const WithoutInterpreterLock unlocked;
  const Deadline deadline = deadline_after(timeout_ms);
  // All puts precede the first wait, so that no rank's arrival depends on another rank's.
  for (int peer = 0; peer < mappings_->world; ++peer) {
    if (peer == mappings_->rank || put(peer, channel, deadline)) continue;
    throw_timeout("barrier", "to leave the previous barrier", peer, channel, timeout_ms);
  }
  for (int peer = 0; peer < mappings_->world; ++peer) {
    if (peer == mappings_->rank || take(peer, channel, deadline)) continue;
    throw_timeout("barrier", "to arrive", peer, channel, timeout_ms);
  }
}

std::vector<void*> CpuSymmetricMemory::get_buffer_ptrs() {
  check_usable("get_buffer_ptrs");
  return mappings_->buffers;
}

std::vector<void*> CpuSymmetricMemory::get_signal_pad_ptrs() {
  check_usable("get_signal_pad_ptrs");
  return mappings_->pads;
}

void** CpuSymmetricMemory::get_buffer_ptrs_dev() {
  check_usable("get_buffer_ptrs_dev");
  return mappings_->buffers.data();
}

void** CpuSymmetricMemory::get_signal_pad_ptrs_dev() {
  check_usable("get_signal_pad_ptrs_dev");
  return mappings_->pads.data();
}

size_t CpuSymmetricMemory::get_buffer_size() { return mappings_->buffer_bytes; }

size_t CpuSymmetricMemory::get_offset() { return offset_; }

}  // namespace collx::memory
