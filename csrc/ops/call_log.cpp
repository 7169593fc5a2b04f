#include "call_log.h"

#include <c10/util/ApproximateClock.h>

#include <bit>

namespace collx {

namespace {

constexpr auto relaxed = std::memory_order_relaxed;

}  // namespace

void CallLog::begin(uint64_t number, const char* op, uint64_t input_bytes,
                    const CallDescriptor& call) {
  using Words = std::array<uint64_t, kWords>;
  const auto words = std::bit_cast<Words>(LoggedCall{op, c10::getTime(), input_bytes, call});
  Slot& slot = slots_[number % kKept];
  // A reader that sees one of the new words will then see either no number or the new number.
  slot.number.store(~uint64_t{0}, relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], relaxed);
  slot.number.store(number, std::memory_order_release);
  count(op, input_bytes);
}

void CallLog::count(const char* op, uint64_t bytes) {
  for (Count& count : counts_) {
    const char* const known = count.op.load(relaxed);
    if (known != nullptr && known != op) continue;
    count.calls.store(count.calls.load(relaxed) + 1, relaxed);
    count.bytes.store(count.bytes.load(relaxed) + bytes, relaxed);
    if (known == nullptr) count.op.store(op, std::memory_order_release);
    return;
  }
}

std::optional<LoggedCall> CallLog::find(uint64_t number) const {
  const Slot& slot = slots_[number % kKept];
  if (slot.number.load(std::memory_order_acquire) != number) return std::nullopt;
  std::array<uint64_t, kWords> words;
  for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (slot.number.load(relaxed) != number) return std::nullopt;
  return std::bit_cast<LoggedCall>(words);
}

std::vector<CallLog::Tally> CallLog::tallies() const {
  std::vector<Tally> found;
  for (const Count& count : counts_) {
    const char* const op = count.op.load(std::memory_order_acquire);
    if (op == nullptr) break;
    found.push_back({op, count.calls.load(relaxed), count.bytes.load(relaxed)});
  }
  return found;
}

}  // namespace collx
