// Registered symmetric allocations of one communicator: is a tensor symmetric, and where do the
// peers' copies are?
//
// OWNERSHIP  Storages are held weakly. An allocation whose storage has died is forgotten at the
// next look-up, so that memory that another tensor got later is never taken for symmetric.
//
// REPLACED   A storage that lives on may get other memory: share_memory_() and swaps of storages
// do that. Each look-up therefore compares the memory that the storage has now with the
// registered one. An address is not enough, since the freed one may be given out again: the
// deleter and its context tell two allocations at one address apart. The entry stays until its
// storage dies or its addresses are registered again. So whether a tensor is symmetric follows from
// only the tensor, not earlier look-ups, which may differ between ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/macros/Export.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "../protocol/types.h"

namespace collx {

/// A place in symmetric memory as one word: {key : 20, offset : 44}.
inline constexpr int kAllocationShift = 44;

struct SymmetricAllocation {
  uint64_t bytes;
  uint64_t key;  // agreed by all ranks
  std::array<char*, kMaxRanks> pointers;
  char* multicast;  // of all of them at once; null: there is no such address
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  // The memory that the storage had when the ranks met.
  void* data;
  void* context;
  c10::DeleterFnPtr deleter;

  /// Whether the storage lives and has the registered memory.
  bool in_place() const;
};

/// A range inside of a live allocation. Valid until the map changes.
struct SymmetricRange {
  const SymmetricAllocation* allocation;
  uint64_t offset;

  /// Allocation and offset in one word that is equal on all ranks.
  uint64_t place() const;
};

/// Not thread-safe: the communicator's lock guards it.
class SymmetricMemory {
 public:
  C10_EXPORT void add(const at::Tensor& tensor, const std::vector<uint64_t>& pointers,
                      uint64_t multicast, uint64_t bytes, uint64_t key, int rank);
  std::optional<SymmetricRange> find(const void* data, uint64_t bytes);
  void clear() { allocations_.clear(); }
  bool is_empty() const { return allocations_.empty(); }

 private:
  void purge();

  std::map<uint64_t, SymmetricAllocation> allocations_;  // by the local address of the first byte
};

}  // namespace collx
