// The registered symmetric allocations of one communicator: whether a tensor is symmetric, and
// where the peers' copies are mapped.
//
// OWNERSHIP  Storages are held weakly. The next lookup removes an allocation whose storage has
// died, so that memory that a different tensor received later is never considered symmetric.
//
// REPLACED   The memory of a live storage can be replaced, by share_memory_() or by swaps of
// storages. Each lookup therefore compares the current memory of the storage with the registered
// memory. The address alone is not enough, since a freed address may be allocated again; the
// deleter and its context distinguish two allocations at one address. The entry stays until its
// storage dies or its addresses are registered again. So whether a tensor is symmetric depends only
// on the tensor, not on earlier lookups, which may differ between ranks.
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

/// The layout of the word that SymmetricRange::place() returns: {key : 20, offset : 44}.
inline constexpr int kAllocationShift = 44;

struct SymmetricAllocation {
  uint64_t bytes;
  uint64_t key;  // agreed by all ranks
  std::array<char*, kMaxRanks> pointers;
  char* multicast;  // multicast address of all of them; null if there is none
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  // The memory that the storage had at the registration.
  void* data;
  void* context;
  c10::DeleterFnPtr deleter;

  /// Whether the storage is alive and has the registered memory.
  bool in_place() const;
};

/// A range within a live allocation. Valid until the map changes.
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
