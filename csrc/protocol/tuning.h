// A tuning table: measured choices that replace those of the built-in table for algorithm "auto".
//
// All ranks have the same table (collx.init votes on it), and a lookup reads only values that all
// ranks agree on.
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "selection.h"

namespace collx {

struct TuningEntry {
  Collective collective = Collective::none;
  DType dtype = DType::uint8;  // of a reduction; copies have uint8, as in CallCore
  bool symmetric = false;      // the value of is_symmetric() for the calls
  uint64_t from = 0;           // bytes of the full tensor
  uint64_t to = 0;             // inclusive
  Algorithm algorithm = Algorithm::automatic;
  int32_t max_blocks = 0;  // as in CallCore; 0: no bound
  int32_t threads = 0;     // per block; 0: depends on the amount of work
};

/// Whether a table can have entries for a collective. Messages with counts have a different length
/// on each rank, and the time of a normalization depends on the shape of its rows.
constexpr bool is_tunable(Collective c) {
  return has_tensors(c) && !is_norm(c) && !row_of(c).counted;
}

/// Whether an entry may name an algorithm. It must run on the device and produce the same bits as
/// the built-in choice. `deterministic` is as in Request.
constexpr bool may_be_named(Collective c, Algorithm a, DeviceKind device, bool symmetric,
                            bool deterministic) {
  const AlgorithmRow& row = row_of(a);
  return is_tunable(c) && a != Algorithm::automatic && has_algorithm(c, a) && row.by != By::group &&
         (row.on_cpu || device == DeviceKind::cuda) && (symmetric || !row.in_place) &&
         !(deterministic && adds_by_multicast(c, a));
}

/// Whether an entry may request this block size.
constexpr bool is_block_size(int64_t threads) {
  return threads >= 64 && threads <= kFullBlock && threads % 64 == 0;
}

/// Whether the algorithm and the grid of an entry are valid for a call of its collective.
constexpr bool suits(const TuningEntry& entry, const Request& r) {
  const Algorithm a = entry.algorithm;
  if (r.epilogue || !r.capabilities.peer_access) return false;
  if (!may_be_named(r.collective, a, r.device, is_symmetric(r), r.deterministic)) return false;
  if (needs_multicast(a) && !r.capabilities.multicast) return false;
  if (adds_by_multicast(r.collective, a) && !(can_be_switched(r) && lies_for_switch(r))) {
    return false;
  }
  // The grid was measured without the call's bound on blocks.
  const bool bounded = r.device == DeviceKind::cuda && r.max_blocks > 0;
  return !bounded || (entry.max_blocks > 0 && entry.max_blocks <= r.max_blocks);
}

class TuningTable {
  using Key = std::tuple<Collective, DType, bool>;
  static constexpr Key key(const TuningEntry& e) { return {e.collective, e.dtype, e.symmetric}; }
  static constexpr bool before(const TuningEntry& a, const TuningEntry& b) {
    return std::tuple(key(a), a.from) < std::tuple(key(b), b.from);
  }

 public:
  TuningTable() = default;
  explicit TuningTable(std::vector<TuningEntry> entries) : entries_(std::move(entries)) {
    std::sort(entries_.begin(), entries_.end(), before);
  }

  bool is_empty() const { return entries_.empty(); }

  /// Whether at most one entry matches any call.
  bool is_disjoint() const {
    for (size_t i = 1; i < entries_.size(); ++i) {
      const TuningEntry &a = entries_[i - 1], &b = entries_[i];
      if (key(a) == key(b) && a.to >= b.from) return false;
    }
    return true;
  }

  /// The entry for a call; null if the built-in table decides.
  const TuningEntry* find(const Request& r) const {
    if (entries_.empty() || r.algorithm != Algorithm::automatic) return nullptr;
    const DType dtype = reduces(r.collective) ? r.dtype : DType::uint8;
    const TuningEntry wanted{r.collective, dtype, is_symmetric(r), r.bytes};
    auto after = std::upper_bound(entries_.begin(), entries_.end(), wanted, before);
    if (after == entries_.begin()) return nullptr;
    const TuningEntry& entry = *--after;
    return key(entry) == key(wanted) && r.bytes <= entry.to && suits(entry, r) ? &entry : nullptr;
  }

 private:
  std::vector<TuningEntry> entries_;
};

/// The request with the choice of an entry; unchanged if `entry` is null.
inline Request with_choice(Request r, const TuningEntry* entry) {
  if (entry == nullptr) return r;
  r.algorithm = entry->algorithm;
  if (entry->max_blocks > 0) r.max_blocks = entry->max_blocks;
  r.threads = entry->threads;
  return r;
}

}  // namespace collx
