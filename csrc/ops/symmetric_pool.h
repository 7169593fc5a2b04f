// Symmetric memory that is handed out and taken back without a vote of the ranks: a pool of one
// communicator, for the buffers that torch.distributed allocates through its backend.
//
// PLACES   Every rank makes the same allocations, in the same order. So all tensors of an
// allocation
//          lie at one place of the ranks' memory, whenever each rank has freed what lay there
//          before: see cpu/agreed_pool.h.
// STREAMS  As in PyTorch's caching allocator, a block belongs to the stream that was current at its
//          allocation. The order of that stream protects its next use. Streams of which
//          Tensor.record_stream, or the wait for a posted call, tells are awaited besides. A peer
//          writes to a block in a call that this rank has entered, on a stream behind the
//          allocation.
// LIFETIME A tensor keeps its segment. What the pool does not use goes with the pool.
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
  /// Where a pool gets memory. Both functions are collective, and raise alike on all ranks.
  class Source {
   public:
    struct Words {
      at::Tensor own;                // on the host, zero
      std::vector<uint64_t> mapped;  // every rank's
      uint64_t most_bytes;           // that the pool may have, equal on all ranks
    };

    virtual ~Source() = default;
    /// Host memory that all ranks map. Nothing where some rank cannot.
    virtual std::optional<Words> words(uint64_t bytes) = 0;
    /// A new symmetric tensor. Undefined where some rank has no memory for it.
    virtual at::Tensor segment(uint64_t bytes) = 0;
  };

  explicit SymmetricPool(std::shared_ptr<Communicator> communicator);
  ~SymmetricPool();
  SymmetricPool(const SymmetricPool&) = delete;
  SymmetricPool& operator=(const SymmetricPool&) = delete;

  /// A tensor of one dimension and at least one element. Undefined, on all ranks, where the pool
  /// has no room, and during the capture of a CUDA graph. Waits for ranks that are more than an
  /// allocation behind. CollectiveTimeout if one does not come, CollectiveMismatch if one allocates
  /// something else.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options, Source& source);

 private:
  struct Use;
  static void end_use(void* use);
  friend bool note_use(const c10::DataPtr& memory, c10::Stream stream);

  bool is_open(Source& source);
  uint32_t stream_number();
  void wait_for(int peer);
  /// Reports the failure to all ranks, and raises it.
  [[noreturn]] void fail(Failure failure, int peer);
  void order_after_recorded(uint32_t block);
  bool record(const Use& use);

  const std::shared_ptr<Communicator> communicator_;
  const int fork_generation_;

  std::mutex allocating_;
  bool opened_ = false;
  std::optional<cpu::AgreedPool> pool_;  // nothing: there is no memory that all ranks map
  at::Tensor words_;
  std::vector<at::Tensor> segments_;
  std::map<c10::StreamId, uint32_t> streams_;  // in the order of their first allocation

  std::mutex mutex_;  // of the streams that uses record, and of what follows
  std::map<uint32_t, std::vector<void*>> recorded_;  // by block: events that its next use awaits
};

/// Keeps the memory from its next use until `stream` has done what it has been given by the time at
/// which the memory is freed. False for memory that is not a pool's.
bool note_use(const c10::DataPtr& memory, c10::Stream stream);

}  // namespace collx
