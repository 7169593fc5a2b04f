#include "failure.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "allreduce.h"
#include "control.h"

namespace collx::cpu {
namespace {

using Word32 = std::atomic_ref<uint32_t>;

// A communicator without peer access has no region and claims on a word beside its status.
bool claim(const RankView& view) {
  uint32_t& word =
      view.region[view.rank] != nullptr ? view.header(view.rank)->claimed : view.status->padding[0];
  return Word32(word).exchange(1, std::memory_order_acq_rel) == 0;
}

void fill_status(HostStatus& status, const StatusRecord& record) {
  status.record = record;
  Word32(status.ready).store(1, std::memory_order_release);
}

void tell(const RankView& view, int rank, const StatusRecord& record) {
  RegionHeader& header = *view.header(rank);
  header.inbox[view.rank] = record;
  // Release: whoever sees the mark finds the report. The first mark stays.
  uint32_t unmarked = 0;
  Word32(header.poison)
      .compare_exchange_strong(unmarked, 1 + static_cast<uint32_t>(view.rank),
                               std::memory_order_acq_rel);
}

/// Several times as long as any sleep, after which a living sleeper looks around.
constexpr std::chrono::milliseconds kSignOfLife = 6 * kLongestSleep;

/// Whether that rank goes on waiting for another one. By then it may also have reported.
bool lives(const RankView& view, const Control& control) {
  Control& own = control_of(view.region[view.rank], view.layout);
  const uint32_t before = control.beats.load(std::memory_order_relaxed);
  const auto end = std::chrono::steady_clock::now() + kSignOfLife;
  while (!poisoned(view) && std::chrono::steady_clock::now() < end) {
    beat(own);  // others may be asking the same of this rank
    std::this_thread::sleep_for(kLongestSleep);
  }
  return control.beats.load(std::memory_order_relaxed) != before;
}

}  // namespace

int missing_rank(const RankView& view, int peer) {
  constexpr int kMostHops = 4;  // the report may not be late by a second
  uint32_t seen = 1u << view.rank;
  int missing = peer;
  for (int hop = 0; hop < kMostHops; ++hop) {
    seen |= 1u << missing;
    const Control& control = control_of(view.region[missing], view.layout);
    if (control.waits_for.load(std::memory_order_relaxed) == 0) return missing;
    if (!lives(view, control) || poisoned(view)) return missing;
    const uint32_t next = control.waits_for.load(std::memory_order_relaxed);
    if (next == 0) return missing;
    if ((seen >> (next - 1) & 1u) != 0) return peer;  // they wait for each other
    missing = static_cast<int>(next) - 1;
  }
  return missing;
}

bool poisoned(const RankView& view) {
  return Word32(view.header(view.rank)->poison).load(std::memory_order_acquire) != 0;
}

void adopt(const RankView& view) {
  RegionHeader& header = *view.header(view.rank);
  const uint32_t mark = Word32(header.poison).load(std::memory_order_acquire);
  if (claim(view)) fill_status(*view.status, header.inbox[mark - 1]);
}

void report(const RankView& view, const StatusRecord& record) {
  if (!claim(view)) return;
  fill_status(*view.status, record);
  if (view.region[view.rank] == nullptr) return;
  for (int rank = 0; rank < view.world; ++rank) tell(view, rank, record);
  // All marks first: a rank that wakes may be asleep on any rank's doorbell.
  for (int rank = 0; rank < view.world; ++rank) {
    ring(control_of(view.region[rank], view.layout).bell);
  }
}

}  // namespace collx::cpu
