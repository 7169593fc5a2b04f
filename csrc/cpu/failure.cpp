#include "failure.h"

#include <atomic>

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

}  // namespace

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
