#include "failure.h"

#include <atomic>
#include <chrono>

#include "../protocol/blame.h"
#include "control.h"

namespace collx::cpu {
namespace {

using Word32 = std::atomic_ref<uint32_t>;
using Word64 = std::atomic_ref<uint64_t>;
using Clock = std::chrono::steady_clock;

constexpr Spinning kAsleep{0, 10};

void leave_note(const CpuView& view, const StatusRecord& record) {
  for (int rank = 0; rank < view.world; ++rank) {
    Note& note = view.header(rank)->inbox[view.rank];
    note.record = record;
    Word32(note.left).store(1, std::memory_order_release);
  }
}

void mark(const CpuView& view) {
  for (int rank = 0; rank < view.world; ++rank) {
    // A rank that sees the mark finds the note. The first mark stays. The exchange is sequentially
    // consistent: see Session::enter.
    uint32_t unmarked = 0;
    Word32(view.header(rank)->poison)
        .compare_exchange_strong(unmarked, 1 + static_cast<uint32_t>(view.rank));
  }
}

bool in_call(const CpuView& view, int rank) {
  return control_of(view.region[rank], view.layout).busy.load() != 0;
}

/// The ranks that will leave no more notes: they are in no call, and will refuse the next one since
/// they are marked. Call this before the notes are read, since a call leaves its note before it
/// ends.
uint32_t quiet_ranks(const CpuView& view) {
  uint32_t quiet = 0;
  for (int rank = 0; rank < view.world; ++rank) {
    const bool marked = Word32(view.header(rank)->poison).load() != 0;
    if (marked && !in_call(view, rank)) quiet |= 1u << rank;
  }
  return quiet;
}

uint32_t left_notes(RegionHeader& header, int world) {
  uint32_t left = 0;
  for (int rank = 0; rank < world; ++rank) {
    left |= Word32(header.inbox[rank].left).load(std::memory_order_acquire) << rank;
  }
  return left;
}

/// Follows the notes from the first rank that failed, as they arrive.
StatusRecord end_of_chain(const CpuView& view) {
  RegionHeader& own = *view.header(view.rank);
  const int first = static_cast<int>(Word32(own.poison).load(std::memory_order_acquire)) - 1;
  Verdict verdict{};
  const auto final = [&] {
    // This runs after this rank has left its note, if it has one to leave.
    const uint32_t quiet = quiet_ranks(view) | 1u << view.rank;
    verdict = judge(own.inbox, left_notes(own, view.world), quiet, first, view.world);
    return verdict.final;
  };
  const auto deadline = Clock::now() + std::chrono::nanoseconds(grace_ns(view.timeout_ns));
  wait_until(control_of(view.region[view.rank], view.layout).bell, final, deadline, kAsleep);
  return verdict.record;
}

/// For threads that came second: the first thread is about to record.
void await_record(const CpuView& view) {
  Doorbell bell{};
  const auto recorded = [&] { return is_recorded(*view.status); };
  const auto longest = std::chrono::nanoseconds(2 * grace_ns(view.timeout_ns)) + kLongestSleep;
  wait_until(bell, recorded, Clock::now() + longest, kAsleep);
}

}  // namespace

bool poisoned(const CpuView& view) {
  return Word32(view.header(view.rank)->poison).load(std::memory_order_acquire) != 0;
}

void adopt(const CpuView& view) {
  // A call in progress has a note to leave, and records the failure itself.
  if (in_call(view, view.rank) || !claim(*view.status)) return await_record(view);
  record_claimed(*view.status, end_of_chain(view));
}

Progress progress_of(const CpuView& view, int rank) {
  const Word64 completed(view.header(rank)->sequence);
  const uint64_t before = completed.load();
  const bool busy = in_call(view, rank);
  const uint64_t after = completed.load();
  return {after, busy && after == before};
}

void report(const CpuView& view, const StatusRecord& record) {
  if (view.region[view.rank] == nullptr) return record_first(*view.status, record);
  if (!claim(*view.status)) return await_record(view);
  const bool first = !poisoned(view);
  leave_note(view, record);
  if (first) mark(view);
  // Ring after all notes and marks are written: a waiting rank may sleep on any rank's doorbell.
  for (int rank = 0; rank < view.world; ++rank) {
    ring(control_of(view.region[rank], view.layout).bell);
  }
  const bool waited = record.failure == Failure::timeout || record.failure == Failure::none;
  record_claimed(*view.status, waited ? end_of_chain(view) : record);
}

}  // namespace collx::cpu
