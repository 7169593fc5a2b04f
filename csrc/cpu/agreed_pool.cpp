#include "agreed_pool.h"

#include <algorithm>
#include <atomic>

namespace collx::cpu {

namespace {

uint64_t load(uint64_t& word, std::memory_order order) { return std::atomic_ref(word).load(order); }
void store(uint64_t& word, uint64_t value, std::memory_order order) {
  std::atomic_ref(word).store(value, order);
}

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15;
  return hash ^ hash >> 32;
}

constexpr uint64_t rounded(uint64_t bytes) {
  return (bytes + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment;
}

}  // namespace

AgreedPool::AgreedPool(std::vector<PoolPage*> pages, int rank, uint64_t most_bytes)
    : pages_(std::move(pages)),
      own_(*pages_.at(static_cast<size_t>(rank))),
      most_bytes_(most_bytes) {}

void AgreedPool::begin(uint64_t bytes, uint32_t stream) {
  bytes_ = rounded(bytes);
  stream_ = stream;
  hash_ = mixed(mixed(hash_, bytes_), stream);
  const std::lock_guard held(mutex_);
  number_ = begun_++;
  requests_[number_ % PoolPage::kKept] = hash_;
  store(own_.requests[number_ % PoolPage::kKept], hash_, std::memory_order_relaxed);
  // The release also publishes earlier give_back() words: their threads held the mutex when they
  // stored them.
  store(own_.begun, begun_, std::memory_order_release);
}

bool AgreedPool::may_decide(int peer) const {
  if (number_ < kPoolLag) return true;
  PoolPage& page = *pages_[static_cast<size_t>(peer)];
  return load(page.begun, std::memory_order_acquire) > number_ - kPoolLag;
}

bool AgreedPool::agrees(int peer) const {
  if (number_ < kPoolLag) return true;
  // The peer is at most two allocations ahead, since it also waits for this rank.
  const uint64_t at = (number_ - kPoolLag) % PoolPage::kKept;
  PoolPage& page = *pages_[static_cast<size_t>(peer)];
  return load(page.requests[at], std::memory_order_relaxed) == requests_[at];
}

bool AgreedPool::is_free(const Block& block) const {
  if (number_ < kPoolLag) return false;
  const auto given_back = [&](PoolPage& page) {
    const auto index = static_cast<size_t>(&block - blocks_.data());
    const uint64_t at = load(page.given_back[index][block.uses % 2], std::memory_order_relaxed);
    return at > block.number && at <= number_ - kPoolLag;
  };
  return given_back(own_) &&
         std::ranges::all_of(pages_, [&](PoolPage* page) { return given_back(*page); });
}

AgreedPool::Place AgreedPool::take(uint32_t index) {
  Block& block = blocks_[index];
  const bool used_before = block.uses > 0;
  block.number = number_;
  ++block.uses;
  return {index, block.segment, block.offset, used_before};
}

std::optional<AgreedPool::Place> AgreedPool::place() {
  const std::lock_guard held(mutex_);
  // A block may be somewhat larger than the tensor.
  const auto end = sizes_.upper_bound({stream_, bytes_ + bytes_ / 4});
  for (auto size = sizes_.lower_bound({stream_, bytes_}); size != end; ++size) {
    for (const uint32_t block : size->second) {
      if (is_free(blocks_[block])) return take(block);
    }
  }
  if (blocks_.size() == kPoolBlocks) return std::nullopt;
  const auto fits = [&](const Segment& segment) { return segment.bytes - segment.used >= bytes_; };
  const auto segment = std::ranges::find_if(segments_, fits);
  if (segment == segments_.end()) return std::nullopt;
  const auto block = static_cast<uint32_t>(blocks_.size());
  blocks_.push_back({static_cast<uint32_t>(segment - segments_.begin()), segment->used, 0, 0});
  segment->used += bytes_;
  sizes_[{stream_, bytes_}].push_back(block);
  return take(block);
}

uint64_t AgreedPool::wanted_segment() const {
  const uint64_t left = most_bytes_ - std::min(most_bytes_, all_bytes_);
  if (bytes_ > left || blocks_.size() == kPoolBlocks) return 0;
  return std::max(bytes_, std::min(kPoolSegmentBytes, left));
}

void AgreedPool::add_segment(uint64_t bytes) {
  segments_.push_back({bytes, 0});
  all_bytes_ += bytes;
}

void AgreedPool::give_back(uint32_t index) {
  const std::lock_guard held(mutex_);
  store(own_.given_back[index][blocks_[index].uses % 2], begun_, std::memory_order_relaxed);
}

}  // namespace collx::cpu
