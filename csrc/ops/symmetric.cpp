#include "symmetric.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace collx {

uint64_t SymmetricRange::place() const { return allocation->key << kAllocationShift | offset; }

bool SymmetricAllocation::in_place() const {
  const auto held = storage.lock();
  if (!held) return false;
  const c10::DataPtr& now = held->data_ptr();
  return now.get() == data && now.get_context() == context && now.get_deleter() == deleter &&
         held->nbytes() >= bytes;
}

void SymmetricMemory::purge() {
  std::erase_if(allocations_, [](const auto& entry) { return entry.second.storage.expired(); });
}

void SymmetricMemory::add(const at::Tensor& tensor, const std::vector<uint64_t>& pointers,
                          uint64_t multicast, uint64_t bytes, uint64_t key, int rank) {
  const c10::Storage& storage = tensor.storage();
  const uint64_t start = pointers.at(static_cast<size_t>(rank));
  TORCH_CHECK_VALUE(key < 1ull << (64 - kAllocationShift) && bytes <= 1ull << kAllocationShift,
                    "collx.register: key ", key, " or nbytes ", bytes, " is too large");
  const c10::DataPtr& memory = storage.data_ptr();
  SymmetricAllocation allocation{bytes,
                                 key,
                                 {},
                                 reinterpret_cast<char*>(multicast),
                                 storage.getWeakStorageImpl(),
                                 reinterpret_cast<void*>(start),
                                 memory.get_context(),
                                 memory.get_deleter()};
  std::transform(pointers.begin(), pointers.end(), allocation.pointers.begin(),
                 [](uint64_t address) { return reinterpret_cast<char*>(address); });
  purge();
  // The memory of older entries in this range has been freed. They would hide parts of the new one.
  allocations_.erase(allocations_.lower_bound(start), allocations_.lower_bound(start + bytes));
  allocations_.emplace(start, std::move(allocation));
}

std::optional<SymmetricRange> SymmetricMemory::find(const void* data, uint64_t bytes) {
  if (allocations_.empty() || bytes == 0) return std::nullopt;
  const auto address = reinterpret_cast<uint64_t>(data);
  auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) return std::nullopt;
  const auto found = std::prev(after);
  if (found->second.storage.expired()) {
    purge();
    return std::nullopt;
  }
  const uint64_t offset = address - found->first;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) return std::nullopt;
  if (!found->second.in_place()) return std::nullopt;
  return SymmetricRange{&found->second, offset};
}

}  // namespace collx
