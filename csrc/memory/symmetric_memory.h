// The result of a rendezvous: the mapped segments of all ranks, and signals between the ranks.
//
// LIFETIME. Handles share one RankMappings, which owns the mappings of the peers' segments and
// shares ownership of this rank's segment. So all memory of a handle stays mapped during the
// handle's lifetime, even after the tensor is freed here or on the peer. Tensors from get_buffer()
// are views without ownership: they require the handle or the allocation, as in PyTorch on CUDA.
//
// SIGNALS. Each rendezvous has its own signal pads, separate from the buffer, so that two groups on
// one allocation never receive each other's signals. Word [channel * world + source] of a rank's
// pad is 1 while a signal from `source` is pending, and 0 otherwise. put_signal sets it from 0 to
// 1, and wait_signal resets it to 0. Both use acquire-release order: data written before a put is
// visible after the wait, and data read before a wait may be overwritten after the next put.
// Waiters of both kinds sleep on the doorbell after the pad (hazard 23).
//
// FORK. A handle belongs to the process that created it, since a child would send signals as its
// parent. In a forked child every call raises an error (hazard 24).
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <vector>

#include "../cpu/futex_wait.h"
#include "deadline.h"
#include "segment.h"

namespace collx::memory {

/// The segments of all ranks for one allocation in one group, mapped in this process.
struct RankMappings {
  std::string group;
  int rank;
  int world;
  pid_t owner;  // the process that created it
  size_t buffer_bytes;
  size_t pad_bytes;
  std::shared_ptr<const Segment> own_buffer;
  std::vector<Segment> segments;  // this rank's pad, and the peers' buffers and pads
  std::vector<void*> buffers;     // by rank
  std::vector<void*> pads;        // by rank: the words, then the doorbell
};

/// Bytes of a pad segment for words of `pad_bytes` bytes.
size_t pad_segment_bytes(size_t pad_bytes);

class CpuSymmetricMemory final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  CpuSymmetricMemory(std::shared_ptr<RankMappings> mappings, size_t offset);

  std::vector<void*> get_buffer_ptrs() override;
  std::vector<void*> get_signal_pad_ptrs() override;
  /// The host is the device, so these arrays are in host memory. They live as long as the handle.
  void** get_buffer_ptrs_dev() override;
  void** get_signal_pad_ptrs_dev() override;
  /// Bytes of the whole allocation, in which get_offset() is an offset, as on CUDA.
  size_t get_buffer_size() override;
  size_t get_offset() override;

  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }

  /// All three throw c10::Error, which names ranks and channel, after timeout_ms (0: 30 s).
  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

  int get_rank() override { return mappings_->rank; }
  int get_world_size() override { return mappings_->world; }
  c10::Device get_device() override { return c10::Device(c10::DeviceType::CPU); }
  bool world_within_direct_access() override { return true; }

 private:
  void check_usable(const char* call) const;
  void check_signal(const char* call, int peer, int channel) const;
  uint32_t* word(int owner, int channel, int source) const;
  cpu::Doorbell& doorbell(int owner) const;
  bool put(int peer, int channel, Deadline deadline);
  bool take(int peer, int channel, Deadline deadline);
  [[noreturn]] void throw_timeout(const char* call, const char* what, int peer, int channel,
                                  size_t timeout_ms) const;

  std::shared_ptr<RankMappings> mappings_;
  size_t offset_;
  cpu::Spinning patience_;
};

}  // namespace collx::memory
