// What a rendezvous yields: every rank's segment mapped here, and signals between the ranks.
//
// LIFETIME. Handles share one RankMappings, which owns the mappings of the peers' segments and a
// share of the own one. So all memory that a handle shows stays mapped while the handle lives, also
// after the tensor is gone here or at the peer. Tensors made by get_buffer() are views that own
// nothing: they need the handle or the allocation, as PyTorch has it on CUDA too.
//
// SIGNALS. Each rendezvous has signal pads of its own, apart from the buffer, so that two groups on
// one allocation never take each other's signals. Word [channel * world + source] of a rank's pad
// is 1 while a signal of `source` lies there, and 0 otherwise: put_signal takes it from 0 to 1 and
// wait_signal back, both with acquire and release, so that data written before a put are seen after
// the wait, and data read before a wait may be overwritten after the next put. Waiters of both
// kinds sleep on the doorbell after the pad (hazard 23).
//
// FORK. A handle belongs to the process that made it: a child would signal in its parent's name.
// There every call refuses (hazard 24).
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

/// All ranks' segments of one allocation in one group, as mapped here.
struct RankMappings {
  std::string group;
  int rank;
  int world;
  pid_t owner;  // the process that made it
  size_t buffer_bytes;
  size_t pad_bytes;
  std::shared_ptr<const Segment> own_buffer;
  std::vector<Segment> segments;  // the own pad, the peers' buffers and pads
  std::vector<void*> buffers;     // by rank
  std::vector<void*> pads;        // by rank: the words, then the doorbell
};

/// Bytes of a pad segment whose words take `pad_bytes`.
size_t pad_segment_bytes(size_t pad_bytes);

class CpuSymmetricMemory final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  CpuSymmetricMemory(std::shared_ptr<RankMappings> mappings, size_t offset);

  std::vector<void*> get_buffer_ptrs() override;
  std::vector<void*> get_signal_pad_ptrs() override;
  /// The host is the device: these arrays lie in its memory, and live as long as the handle.
  void** get_buffer_ptrs_dev() override;
  void** get_signal_pad_ptrs_dev() override;
  /// Bytes of the whole allocation, on which get_offset() counts, as on CUDA.
  size_t get_buffer_size() override;
  size_t get_offset() override;

  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }

  /// All three throw c10::Error after timeout_ms (0: 30 s), naming ranks and channel.
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
