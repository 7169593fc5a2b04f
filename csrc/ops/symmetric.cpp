#include "symmetric.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace collx {

uint64_t SymmetricRange::place() const { return allocation->key << kAllocationShift | offset; }

void SymmetricMemory::purge() {
  std::erase_if(allocations_, [](const auto& entry) { return entry.second.storage.expired(); });
}

void SymmetricMemory::add(const at::Tensor& tensor, const std::vector<uint64_t>& pointers,
                          uint64_t multicast, uint64_t bytes, uint64_t key, int rank) {
  const c10::Storage& storage = tensor.storage();
  const auto start = reinterpret_cast<uint64_t>(storage.data());
  TORCH_CHECK_VALUE(pointers.at(static_cast<size_t>(rank)) == start, "collx.register: pointers[",
                    rank, "] is not where the tensor's storage begins on this rank");
  TORCH_CHECK_VALUE(bytes > 0 && bytes <= storage.nbytes(), "collx.register: nbytes: got ", bytes,
                    "; the tensor's storage has ", storage.nbytes());
  TORCH_CHECK_VALUE(key < 1ull << (64 - kAllocationShift) && bytes <= 1ull << kAllocationShift,
                    "collx.register: key ", key, " or nbytes ", bytes, " is too large");
  SymmetricAllocation allocation{
      bytes, key, {}, reinterpret_cast<char*>(multicast), storage.getWeakStorageImpl()};
  std::transform(pointers.begin(), pointers.end(), allocation.pointers.begin(),
                 [](uint64_t address) { return reinterpret_cast<char*>(address); });
  purge();
  allocations_.insert_or_assign(start, std::move(allocation));
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
  return SymmetricRange{&found->second, offset};
}

}  // namespace collx
