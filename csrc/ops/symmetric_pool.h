// A pool of symmetric memory for one communicator, which allocates and frees without a vote of the
// ranks. torch.distributed allocates buffers from it through its backend.
//
// PLACES   Every rank makes the same allocations in the same order. So all tensors of an allocation
//          have the same place in the memory of their ranks, regardless of when each rank freed the
//          previous tensor there: see cpu/agreed_pool.h.
// STREAMS  As in PyTorch's caching allocator, a block belongs to the stream that was current at its
//          allocation. The order of that stream protects its next use. The next use also waits for
//          streams that were reported by Tensor.record_stream or by a wait for a posted call. A
//          peer writes to a block only in a call that this rank has entered, on a stream ordered
//          after the allocation.
// LIFETIME A tensor keeps its segment alive. Unused memory is freed with the pool.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../cpu/agreed_pool.h"
#include "../protocol/status.h"

namespace collx {

class Communicator;

class C10_EXPORT SymmetricPool : public std::enable_shared_from_this<SymmetricPool> {
 public:
  /// Provides memory for a pool. Both functions are collective, and raise equally on all ranks.
  class Source {
   public:
    struct Words {
      at::Tensor own;                // in host memory, filled with zeros
      std::vector<uint64_t> mapped;  // addresses of all ranks' words
      uint64_t most_bytes;           // size limit of the pool, equal on all ranks
    };

    virtual ~Source() = default;
    /// Host memory that all ranks map. Returns nullopt if some rank cannot map it.
    virtual std::optional<Words> words(uint64_t bytes) = 0;
    /// A new symmetric tensor. Returns an undefined tensor if some rank has no memory for it.
    virtual at::Tensor segment(uint64_t bytes) = 0;
  };

  explicit SymmetricPool(std::shared_ptr<Communicator> communicator);
  ~SymmetricPool();
  SymmetricPool(const SymmetricPool&) = delete;
  SymmetricPool& operator=(const SymmetricPool&) = delete;

  /// Allocates a tensor of one dimension and at least one element. Returns an undefined tensor, on
  /// all ranks, if the pool has no room, and during the capture of a CUDA graph. Waits for ranks
  /// that are more than one allocation behind. Raises CollectiveTimeout if such a rank does not
  /// arrive, and CollectiveMismatch if a rank makes a different allocation.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options, Source& source);

 private:
  struct Use;
  static void end_use(void* use);
  friend bool note_use(const c10::DataPtr& memory, c10::Stream stream);

  bool is_open(Source& source);
  uint32_t stream_number();
  void wait_for(int peer);
  /// Reports the failure to all ranks and raises it.
  [[noreturn]] void fail(Failure failure, int peer);
  void order_after_recorded(uint32_t block);
  bool record(const Use& use);

  const std::shared_ptr<Communicator> communicator_;
  const int fork_generation_;

  std::mutex allocating_;
  bool opened_ = false;
  std::optional<cpu::AgreedPool> pool_;  // nullopt: there is no memory that all ranks map
  at::Tensor words_;
  std::vector<at::Tensor> segments_;
  std::map<c10::StreamId, uint32_t> streams_;  // numbered in the order of their first allocation

  std::mutex mutex_;                                 // guards Use::streams and recorded_
  std::map<uint32_t, std::vector<void*>> recorded_;  // by block: events before its next use
};

/// Delays the next use of the memory until `stream` has completed all work that is enqueued on it
/// when the memory is freed. Returns false for memory that does not belong to a pool.
bool note_use(const c10::DataPtr& memory, c10::Stream stream);

}  // namespace collx
