// Selects the algorithm of a call, as a pure function of values that all ranks agree on.
//
// Thresholds are measured; docs/internals/engineering-log.md has the measurements and describes how
// to repeat them.
#pragma once

#include "algorithms.h"
#include "call.h"
#include "types.h"

namespace collx {

inline constexpr uint32_t kMostCluster = 8;  // blocks of a portable cluster

/// Clusters of a fused normalization that are resident on a device at once, by threads of a block
/// and blocks of a cluster, both powers of two. Without hardware support, there are none of two or
/// more blocks. The default, before a device has been measured, is one of each.
struct Residency {
  static constexpr uint32_t kLeastThreads = 64;
  int32_t held[4][4] = {{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}};

  constexpr uint64_t clusters(uint32_t threads, uint32_t size) const {
    return static_cast<uint64_t>(held[doublings(kLeastThreads, threads)][doublings(1, size)]);
  }

  /// Calls f(threads, size, held) for each entry.
  template <typename F, typename Self>
  static constexpr void for_each(Self& self, F f) {
    for (uint32_t threads = kLeastThreads; threads <= kFullBlock; threads *= 2) {
      for (uint32_t size = 1; size <= kMostCluster; size *= 2) {
        f(threads, size, self.held[doublings(kLeastThreads, threads)][doublings(1, size)]);
      }
    }
  }

 private:
  static constexpr int doublings(uint32_t from, uint32_t to) {
    int count = 0;
    for (; from < to; from *= 2) ++count;
    return count;
  }
};

/// The capabilities of a communicator's devices: the minimum over all ranks, so that all ranks have
/// the same values.
struct Capabilities {
  bool peer_access = true;       // ranks can read and write each other's memory
  bool dependent_launch = true;  // a kernel may be launched before the preceding kernel has ended
  bool multicast = false;        // one address can refer to the same memory of all ranks
  int bulk_blocks = kMaxBlocks;  // blocks that copy in bulk and are resident at once
  Residency residency;
};

struct Request : CallCore {
  DeviceKind device = DeviceKind::cpu;
  uint64_t bytes = 0;    // of the full tensor
  uint64_t message = 0;  // bytes of the longest message between two ranks; unused in all-reduce
  int world = 1;
  bool input_symmetric = false;
  bool output_symmetric = false;
  bool input_multicast = false;  // the input also has a multicast address
  bool output_multicast = false;
  bool in_place = false;      // the output is the input
  bool deterministic = true;  // the reduction takes the ranks in order
  bool overlap = false;       // the call leaves multiprocessors to other work
  bool exact_sums = false;    // sums are not rounded to the dtype in transit
  bool epilogue = false;      // CUDA: each rank's kernel finishes its own output
  int room = 1;               // blocks of kFullBlock threads that the communicator may use at once
  // Additional blocks for algorithms that push. Only this value may differ between ranks: the grids
  // of these algorithms need not be equal, because epochs belong to tiles.
  int spare_room = 0;
  int lanes = static_cast<int>(kMostLanes);  // of the communicator
  int threads = 0;                           // per block; 0: depends on the amount of work
  Capabilities capabilities;
};

/// The fewest vectors for which a call adds another lane. With less work per lane, waits would take
/// most of its time.
inline constexpr uint64_t kLeastLaneVectors = kLeastLaneSlotBytes / kVectorBytes;

/// Vectors of data in `share` of the call.
constexpr uint64_t data_vectors(const Request& r, Share share) {
  const auto world = static_cast<uint64_t>(r.world);
  const uint64_t all = ceil_div<uint64_t>(r.bytes, kVectorBytes);
  const uint64_t message = ceil_div<uint64_t>(r.message, kVectorBytes);
  switch (share) {
    case Share::tensor: return all;
    case Share::part: return ceil_div(all, world);
    case Share::message: return message;
    case Share::slice: return ceil_div(message, world > 1 ? world - 1 : 1);
    case Share::none: break;
  }
  return 0;
}

/// Vectors of one stage. With slots, these are the vectors that one rank sends to one other rank.
constexpr uint64_t vectors_of(const Request& r, Algorithm algorithm) {
  const bool masked = pushes_into_slots(algorithm) && is_masked(r.collective, r.dtype);
  return wire_vectors(masked, data_vectors(r, row_of(algorithm).share));
}

/// Vectors that determine the size of the grid. Messages in slots always count as if they had
/// masks.
constexpr uint64_t work_of(const Request& r, Algorithm algorithm) {
  const Share share = row_of(algorithm).share;
  const bool messages = share == Share::message || share == Share::slice;
  if (!messages || !pushes_into_slots(algorithm)) return vectors_of(r, algorithm);
  return wire_vectors(true, data_vectors(r, share));
}

/// Up to this size, staging with its single exchange between processes is faster than the two
/// barriers around symmetric inputs of a one-shot call.
inline constexpr uint64_t kCpuStagedUpTo = 8 << 10;

/// Whether peers read inputs from the staging memory, and results from the memory for results.
constexpr bool stages_inputs(const Request& r, Algorithm a) {
  if (!row_of(a).staging || !reduces(r.collective)) return false;
  if (!(adds_by_multicast(r.collective, a) ? r.input_multicast : r.input_symmetric)) return true;
  if (row_of(a).share != Share::tensor) return false;
  // All ranks read the whole input. In an in-place call it could change while a peer reads it.
  return r.in_place || (r.device == DeviceKind::cpu && r.bytes <= kCpuStagedUpTo);
}
constexpr bool stages_results(const Request& r, Algorithm a) {
  return row_of(a).results && (row_of(a).staging || !r.output_symmetric);
}

/// Whether multicast stores go into the outputs of all ranks. If outputs have no multicast address,
/// or if each rank must still finish its own output, they go into the staging memory of all ranks.
constexpr bool stores_into_outputs(const Request& r, Algorithm a) {
  return stores_by_multicast(r.collective, a) && r.output_multicast && !r.epilogue;
}
constexpr bool uses_staging(const Request& r, Algorithm a) {
  return stages_inputs(r, a) ||
         (stores_by_multicast(r.collective, a) && !stores_into_outputs(r, a));
}

/// Whether the switch can perform the reduction of the call.
constexpr bool can_be_switched(const Request& r) {
  return r.capabilities.multicast && !r.exact_sums && sums_by_multicast(r.reduce_op, r.dtype);
}
/// Whether the tensors that peers access have multicast addresses.
constexpr bool lies_for_switch(const Request& r) {
  const Touched t = touched(r.collective);
  return (!t.input || r.input_multicast) && (!t.output || r.output_multicast);
}

/// The slot area of a layout that `slots` names; null for none.
constexpr const SlotArea* slots_of(const CudaLayout& layout, SlotsFor slots) {
  switch (slots) {
    case SlotsFor::oneshot: return &layout.oneshot;
    case SlotsFor::twoshot: return &layout.twoshot;
    case SlotsFor::channels: return &layout.channels.slots;
    case SlotsFor::none: break;
  }
  return nullptr;
}

/// Bytes of the region that a call occupies if it runs in a single use.
constexpr uint64_t workspace_bytes(const Request& r, Algorithm algorithm) {
  const AlgorithmRow& row = row_of(algorithm);
  const auto world = static_cast<uint64_t>(r.world);
  const auto tiled = [](uint64_t vectors) {
    return round_up<uint64_t>(vectors, kTileVectors) * kVectorBytes;
  };
  // Some collectives that do not divide the tensor into parts send one message to all ranks.
  const bool divided =
      row.share == Share::part || (row.share == Share::message && !sends_all(r.collective));
  uint64_t bytes = 0;
  if (pushes_into_slots(algorithm)) {
    bytes += static_cast<uint64_t>(row.stages) * world * tiled(vectors_of(r, algorithm));
  }
  if (uses_staging(r, algorithm)) {
    bytes += (divided ? world : 1) * tiled(data_vectors(r, row.share));
  }
  if (stages_results(r, algorithm)) bytes += tiled(data_vectors(r, Share::part));
  if (row.lanes) {
    // At most a full ring for each lane.
    const uint64_t sent = data_vectors(r, row.share) * kVectorBytes;
    const uint64_t rings = uint64_t{kMostLanes} * kRingSlots * kMostLaneSlotBytes;
    return static_cast<uint64_t>(row.stages) * (world - 1) * (sent < rings ? sent : rings);
  }
  return 2 * bytes;
}

/// Whether a call through lanes runs on the kernels for few blocks. These kernels do not support
/// epilogues.
constexpr bool has_few_blocks(const Request& r) {
  return !r.epilogue && r.world > 1 &&
         (r.room <= kFewBlocks || (r.max_blocks > 0 && r.max_blocks <= kFewBlocks));
}

/// The calls to which a row is restricted.
enum class For : uint8_t {
  all,
  symmetric,  // calls for which is_symmetric() holds
  switched,   // calls whose reduction the switch may perform, in any order
  overlap,    // symmetric calls of a communicator that leaves multiprocessors to other work
  few,        // calls with few blocks: see has_few_blocks
};

/// The algorithm on a device for calls that request one of `asked`.
struct SelectionRow {
  Algorithms asked;
  Collectives collectives;
  DeviceKind device;
  For calls;
  int max_world;   // for worlds up to this one
  uint64_t up_to;  // bytes
  Algorithm algorithm;
  uint64_t from = 0;  // bytes
};

inline constexpr uint64_t kAnySize = ~0ull;

namespace detail::selection {

using enum Algorithm;
using enum DeviceKind;
using enum For;

inline constexpr Algorithms kAuto = only(automatic);
inline constexpr Algorithms kOnestage = only(onestage);
inline constexpr Algorithms kTwoshot = only(twoshot_push);
inline constexpr Algorithms kStaged = only(staged);
inline constexpr Algorithms kLanes = only(lanes);
/// Between two ranks, lanes are faster than slots from these sizes on. They are also faster for a
/// broadcast between four ranks, and for copies between three or four, where gather and scatter
/// have a smaller threshold.
inline constexpr uint64_t kLanesFrom = 12 << 20;
inline constexpr uint64_t kLanesFromOfBroadcast = 8 << 20;
inline constexpr uint64_t kLanesFromOfAlltoallv = 8 << 20;
inline constexpr uint64_t kLanesFromOfReduce = 12 << 20;
inline constexpr uint64_t kLanesFromOfReducescatter = 24 << 20;
inline constexpr uint64_t kLanesFromOfCopies = (16 << 20) + 1;
inline constexpr uint64_t kLanesFromOfRoots = 8 << 20;
/// With few blocks, lanes are faster from this size on.
inline constexpr uint64_t kLanesFromOfFew = 1 << 20;
/// From this size on, direct symmetric copies are as fast as lanes, except for gather.
inline constexpr uint64_t kDirectFrom = 16 << 20;
/// From this size on, a reduce in two stages between four ranks is faster with fewer blocks.
inline constexpr uint64_t kFewerBlocksFrom = 16 << 20;
/// From this size on, copy engines are worth the cost of a barrier before and after.
inline constexpr uint64_t kCopyEngineFrom = 1 << 20;
inline constexpr Algorithms kRelayed = only(twostage) | only(pipelined);
inline constexpr Collectives kOneWay =
    kPairs & collectives_where([](const CollectiveRow& row) { return is_one_way(row.collective); });

// The first matching row applies.
inline constexpr SelectionRow kRows[] = {
    // Between two ranks, the switch saves nothing. Its thresholds for more ranks are estimates: see
    // docs/internals/engineering-log.md.
    {kAuto, kAllreduce, cuda, few, 2, kAnySize, twoshot_lanes, kLanesFromOfFew},
    {kAuto, kAllreduce, cuda, all, 2, 1 << 20, oneshot_push},
    {kAuto | kTwoshot, kAllreduce, cuda, all, 1, kAnySize, twoshot_push},
    {kAuto, kAllreduce, cuda, all, 2, kLanesFrom - 1, twoshot_push},
    {kAuto, kAllreduce, cuda, all, 2, kAnySize, twoshot_lanes},
    {kTwoshot, kAllreduce, cuda, all, 2, kAnySize, twoshot_lanes, kLanesFrom},
    {only(twoshot_lanes), kAllreduce, cpu, all, 16, kAnySize, twoshot_push},
    {kLanes, kExchanges, cpu, all, 16, kAnySize, staged},
    {only(copy_engine), kDirectCopies, cpu, all, 16, kAnySize, direct},
    {kAuto, kDirectCopies, cuda, overlap, 8, kAnySize, copy_engine, kCopyEngineFrom},
    {kAuto, kAllreduce, cuda, switched, 4, kAnySize, multimem_twoshot, 6 << 20},
    {kAuto, kAllreduce, cuda, switched, 8, kAnySize, multimem_twoshot, 2 << 20},
    {kAuto, kAllreduce, cuda, all, 4, 192 << 10, oneshot_push},
    {kAuto, kAllreduce, cuda, all, 8, 96 << 10, oneshot_push},
    {kAuto, kAllreduce, cuda, all, 8, kAnySize, twoshot_push},
    {kAuto, kAllreduce, cpu, symmetric, 2, 2 << 10, oneshot_pull},
    {kAuto, kAllreduce, cpu, symmetric, 2, kAnySize, pull_push},
    {kAuto, kAllreduce, cpu, symmetric, 16, 8 << 10, oneshot_pull},
    {kAuto, kAllreduce, cpu, symmetric, 16, kAnySize, pull_push},
    {kAuto, kAllreduce, cpu, all, 2, 1 << 20, oneshot_pull},
    {kAuto, kAllreduce, cpu, all, 16, 16 << 10, oneshot_pull},
    {kAuto, kAllreduce, cpu, all, 16, kAnySize, twoshot_pull},

    {kAuto, kBroadcast, cuda, all, 1, kAnySize, onestage},
    {kOnestage, kBroadcast, cuda, all, 1, kAnySize, channels},
    {kAuto, kBroadcast, cuda, few, 2, kAnySize, lanes, kLanesFromOfFew},
    {kAuto, kBroadcast, cuda, all, 2, kLanesFromOfBroadcast - 1, onestage},
    {kAuto | kOnestage, kBroadcast, cuda, all, 2, kAnySize, lanes, kLanesFromOfBroadcast},
    {kOnestage, kBroadcast, cuda, all, 2, kLanesFromOfBroadcast - 1, channels},
    {kAuto, kBroadcast, cuda, all, 8, 256 << 10, onestage},
    {kAuto, kBroadcast, cuda, few, 8, kAnySize, pipelined},
    {kAuto, kBroadcast, cuda, all, 3, kAnySize, pipelined},
    {kAuto, kBroadcast, cuda, all, 4, kAnySize, lanes, kLanesFromOfBroadcast},
    {kAuto, kBroadcast, cuda, all, 8, kAnySize, pipelined},
    // Between more than two ranks, the ranks pass on what the root sends.
    {kLanes, kBroadcast, cuda, all, 2, kAnySize, lanes},
    {kLanes, kBroadcast, cuda, few, 8, kAnySize, lanes},
    {kLanes, kBroadcast, cuda, all, 8, kAnySize, broadcast_lanes},
    {kAuto, kBroadcast, cpu, all, 16, kAnySize, onestage},
    // Up to this size, slots are faster than the two barriers of stores into symmetric outputs.
    {kOnestage, kBroadcast, cuda, all, 8, 4 << 20, channels},
    {kOnestage, kBroadcast, cuda, symmetric, 8, kAnySize, direct},
    {kOnestage, kBroadcast, cuda, all, 8, kAnySize, channels},
    // The same on the CPU. Between two ranks there is no rank that could relay.
    {kOnestage | kRelayed, kBroadcast, cpu, all, 2, 64 << 10, staged},
    {kOnestage | kRelayed, kBroadcast, cpu, symmetric, 2, kAnySize, direct},
    {kOnestage | kRelayed, kBroadcast, cpu, all, 2, kAnySize, staged},
    {kOnestage, kBroadcast, cpu, all, 16, 64 << 10, staged},
    {kOnestage, kBroadcast, cpu, symmetric, 16, kAnySize, direct},
    {kOnestage, kBroadcast, cpu, all, 16, kAnySize, staged},

    {kAuto, kPairs, cuda, all, 1, kAnySize, staged},
    {kStaged, kOneWay, cuda, all, 1, kAnySize, channels},
    {kStaged, kPairs, cuda, all, 1, kAnySize, staged},
    // Slots need no barrier. Up to the threshold for lanes they are faster than direct copies.
    {kAuto | kStaged, kReduce, cuda, all, 2, kAnySize, lanes, kLanesFromOfReduce},
    {kAuto | kStaged, kCounted, cuda, all, 2, kAnySize, lanes, kLanesFromOfAlltoallv},
    {kAuto | kStaged, kReductions & ~kReduce, cuda, all, 2, kAnySize, lanes,
     kLanesFromOfReducescatter},
    {kAuto, kPairs & ~kReductions & ~kOneWay, cuda, symmetric, 2, kAnySize, direct, kDirectFrom},
    {kAuto, kPairs, cuda, few, 2, kAnySize, lanes, kLanesFromOfFew},
    {kAuto | kStaged, kPairs & ~kReductions & ~kCounted, cuda, all, 2, kAnySize, lanes,
     kLanesFromOfCopies},
    {kAuto, kPairs, cuda, all, 2, kLanesFromOfReducescatter - 1, staged},
    {kAuto, kReduce, cuda, switched, 8, kAnySize, multimem, 4 << 20},
    // Pulling is slower than pushing, so a reduction uses slots at any size. So does a call with
    // counts: the ranks do not know each other's sizes, and must select the same algorithm.
    {kAuto, kReductions | kCounted, cuda, all, 8, kAnySize, staged},
    {kAuto, kPairs, cuda, all, 8, 4 << 20, staged},
    {kAuto, only(Collective::gather), cuda, all, 4, kAnySize, lanes, kLanesFromOfRoots},
    {kAuto, only(Collective::scatter), cuda, all, 4, kDirectFrom, lanes, kLanesFromOfRoots},
    {kAuto, kPairs & ~kCounted, cuda, symmetric, 8, kAnySize, direct},
    {kAuto, kPairs & ~kCounted, cuda, all, 4, kAnySize, lanes, kLanesFromOfCopies},
    {kAuto, kPairs, cuda, all, 8, kAnySize, staged},
    {kAuto, kCounted, cpu, all, 16, kAnySize, staged},
    {kAuto, kPairs & ~kCounted, cpu, symmetric, 16, kAnySize, direct},
    {kAuto, kPairs, cpu, all, 16, kAnySize, staged},
    // A large reduce is divided among the ranks other than the root.
    {kStaged, kReduce, cuda, all, 2, kLanesFromOfReduce - 1, channels},
    {kStaged, kReduce, cuda, all, 8, 512 << 10, channels},
    {kStaged, kReduce, cuda, all, 8, kAnySize, reduce_twostage},
    {kStaged, kOneWay, cuda, all, 8, kAnySize, channels},

    {kAuto, kNorms, cuda, all, 2, kAnySize, oneshot_push},
    {kAuto, kNorms, cuda, switched, 4, kAnySize, multimem_twoshot, 8 << 20},
    {kAuto, kNorms, cuda, switched, 8, kAnySize, multimem_twoshot, 4 << 20},
    {kAuto, kNorms, cuda, all, 4, 512 << 10, oneshot_push},
    {kAuto, kNorms, cuda, all, 8, 256 << 10, oneshot_push},
    {kAuto, kNorms, cuda, all, 8, kAnySize, twoshot_push},
    {kAuto, kNorms, cpu, all, 2, kAnySize, twoshot_pull},
    {kAuto, kNorms, cpu, all, 16, 8 << 10, oneshot_pull},
    {kAuto, kNorms, cpu, all, 16, kAnySize, twoshot_pull},
    {kAuto, kScatteringNorms, cuda, all, 8, kAnySize, staged},
    {kAuto, kScatteringNorms, cpu, all, 16, kAnySize, staged},

    {kAuto, kBarrier, cuda, all, 8, kAnySize, direct},
    {kAuto, kBarrier, cpu, all, 16, kAnySize, direct},
#if defined(COLLX_EXTRA_SELECTION)
    COLLX_EXTRA_SELECTION
#endif
};

}  // namespace detail::selection

inline constexpr auto& kSelection = detail::selection::kRows;

constexpr bool names_what_there_is(const SelectionRow& row) {
  const AlgorithmRow& taken = row_of(row.algorithm);
  if (!taken.on_cpu && row.device == DeviceKind::cpu) return false;
  for (const AlgorithmRow& asked : kAlgorithms) {
    if ((row.asked & only(asked.algorithm)) == 0) continue;
    const bool selects = asked.algorithm == Algorithm::automatic;
    if ((row.collectives & ~(selects ? taken : asked).serves) != 0) return false;
  }
  return true;
}
static_assert([] {
  for (const SelectionRow& row : kSelection) {
    if (!names_what_there_is(row)) return false;
  }
  return true;
}());

/// Whether all tensors that peers access in place are symmetric.
constexpr bool is_symmetric(const Request& r) {
  if (r.in_place && overwrites_in_place(r.collective)) return false;
  const Touched t = touched(r.collective);
  return (!t.input || r.input_symmetric) && (!t.output || r.output_symmetric);
}

/// The range of rows that can match a call, so that a lookup reads few rows.
struct SelectionRange {
  uint8_t first = 0;
  uint8_t end = 0;
};

namespace detail::selection {
struct Ranges {
  SelectionRange of[2][kCollectiveCount][kAlgorithmCount];
};
constexpr Ranges find_ranges() {
  Ranges ranges{};
  const size_t count = sizeof(kRows) / sizeof(kRows[0]);
  for (size_t i = 0; i < count; ++i) {
    const SelectionRow& row = kRows[i];
    for (size_t c = 0; c < kCollectiveCount; ++c) {
      if ((row.collectives & only(static_cast<Collective>(c))) == 0) continue;
      for (size_t a = 0; a < kAlgorithmCount; ++a) {
        if ((row.asked & only(static_cast<Algorithm>(a))) == 0) continue;
        SelectionRange& range = ranges.of[static_cast<int>(row.device)][c][a];
        if (range.end == 0) range.first = static_cast<uint8_t>(i);
        range.end = static_cast<uint8_t>(i + 1);
      }
    }
  }
  return ranges;
}
}  // namespace detail::selection

inline constexpr auto kSelectionRanges = detail::selection::find_ranges();
static_assert(sizeof(kSelection) / sizeof(kSelection[0]) < 256);

/// The index of the first matching row; -1 if there is none.
constexpr int find_row(const Request& r, Algorithm asked) {
  const SelectionRange range =
      kSelectionRanges.of[static_cast<int>(r.device)][static_cast<size_t>(r.collective)]
                         [static_cast<size_t>(asked)];
  if (range.first == range.end) return -1;
  const bool switched = !r.deterministic && can_be_switched(r) && lies_for_switch(r);
  const bool symmetric = is_symmetric(r);
  const bool fits[] = {true, symmetric, switched, symmetric && r.overlap, has_few_blocks(r)};
  for (int i = range.first; i < range.end; ++i) {
    const SelectionRow& row = kSelection[i];
    if ((row.asked & only(asked)) != 0 && (row.collectives & only(r.collective)) != 0 &&
        row.device == r.device && fits[static_cast<int>(row.calls)] && r.world <= row.max_world &&
        r.bytes <= row.up_to && r.bytes >= row.from) {
      return i;
    }
  }
  return -1;
}

/// The table's choice, or the requested algorithm if no row matches.
constexpr Algorithm select_from_table(const Request& r, Algorithm asked) {
  const int row = find_row(r, asked);
  return row < 0 ? asked : kSelection[row].algorithm;
}

/// Whether a backend implements, according to `has(collective, algorithm)`, every algorithm that a
/// call of these collectives can run: the requested one, or those that replace it in the table.
template <typename Has>
constexpr bool is_complete(DeviceKind device, Collectives collectives, Has has) {
  const int most = device == DeviceKind::cpu ? kMaxCpuRanks : kMaxCudaRanks;
  for (const CollectiveRow& collective : kCollectives) {
    const Collective c = collective.collective;
    for (const AlgorithmRow& asked : kAlgorithms) {
      const Algorithm a = asked.algorithm;
      if (a == Algorithm::automatic || !has_kernels(a)) continue;
      if ((collectives & asked.serves & only(c)) == 0) continue;
      if (asked.multicast && device == DeviceKind::cpu) continue;  // rejected by name
      bool replaced = false;
      for (const SelectionRow& row : kSelection) {
        if (row.device != device || (row.asked & only(a)) == 0) continue;
        if ((row.collectives & only(c)) == 0) continue;
        if (!has(c, row.algorithm)) return false;
        replaced |= row.calls == For::all && row.max_world == most && row.up_to == kAnySize;
      }
      if (!replaced && !has(c, a)) return false;
    }
  }
  return true;
}

/// The algorithm by which a call is named: the requested one, or else the table's choice.
constexpr Algorithm select_algorithm(const Request& r) {
  if (r.algorithm != Algorithm::automatic) return r.algorithm;
  if (!r.capabilities.peer_access) return Algorithm::fallback;
  const Algorithm found = select_from_table(r, Algorithm::automatic);
  return found == Algorithm::automatic ? Algorithm::fallback : found;
}

namespace detail {

constexpr int clamp_blocks(uint64_t wanted, uint64_t limit) {
  const uint64_t blocks = wanted < limit ? wanted : limit;
  return blocks < 1 ? 1 : static_cast<int>(blocks);
}

}  // namespace detail

/// Lanes that a call may use with one block for each. All ranks must agree on the number, so spare
/// blocks do not count.
constexpr int lanes_of(const Request& r) {
  const int room = r.max_blocks > 0 && r.max_blocks < r.room ? r.max_blocks : r.room;
  return room < r.lanes ? room : r.lanes;
}

namespace detail {

/// Lanes that each block serves in a call with few blocks. More lanes keep more chunks in flight,
/// but short chunks are slow.
constexpr int width_of(const Request& r, int blocks, uint64_t vectors) {
  constexpr uint64_t kLeastChunk = (8 << 10) / kVectorBytes;
  int width = 1;
  while (2 * width <= kWidest && 2 * width * blocks <= r.lanes &&
         static_cast<uint64_t>(2 * width * blocks) * kLeastChunk <= vectors) {
    width *= 2;
  }
  return width;
}

/// Blocks that a call may use of those that fit. In a large reduce between four ranks, each thread
/// of all blocks would have exactly two vectors in a use: all blocks would send at the same time,
/// and the links would be idle while they wait. With three quarters of the blocks, some threads
/// have three.
constexpr uint64_t room_of(const Request& r, Algorithm a, uint64_t fitting) {
  const bool fewer =
      a == Algorithm::reduce_twostage && r.world == 4 && r.message >= selection::kFewerBlocksFrom;
  const bool bounded = r.max_blocks > 0 && r.max_blocks < kMaxBlocks;
  const auto most = static_cast<uint64_t>(bounded ? r.max_blocks : kMaxBlocks);
  const uint64_t room = fewer ? fitting * 3 / 4 : fitting;
  return room < most ? room : most;
}

}  // namespace detail

/// Bytes of the largest chunk of a call in which a block serves several lanes. The chunks of all
/// ranks that a block reduces at a time take as much shared memory as two chunks of a copy. In an
/// all-reduce, which has one more role, they take as much as one.
constexpr uint32_t largest_wide_chunk(Collective collective, int world, uint32_t slot_bytes) {
  uint32_t most = kMostWideChunkBytes;
  if (reduces(collective)) {
    const uint32_t chunks = collective == Collective::allreduce ? 1 : 2;
    most = chunks * kMostWideChunkBytes / static_cast<uint32_t>(world) / 128 * 128;
  }
  return slot_bytes < most ? slot_bytes : most;
}

/// Algorithm, grid and block size of a call.
constexpr Plan select(const Request& r) {
  Plan plan;
  plan.named = select_algorithm(r);
  plan.algorithm = select_from_table(r, plan.named);
  // With an epilogue, peers cannot store results into an output: its rank must still finish them.
  if (r.epilogue && plan.algorithm == Algorithm::pull_push)
    plan.algorithm = Algorithm::twoshot_pull;
  plan.staged = stages_inputs(r, plan.algorithm);
  plan.into_outputs = stores_into_outputs(r, plan.algorithm);
  if (r.device == DeviceKind::cpu || !has_kernels(plan.algorithm)) return plan;

  const uint64_t work = work_of(r, plan.algorithm);
  if (row_of(plan.algorithm).lanes) {
    plan.threads = kLaneBlock;
    // Only the two ranks of a counted message know its length.
    const uint64_t wanted =
        row_of(r.collective).counted ? kMostLanes : ceil_div(work, kLeastLaneVectors);
    plan.blocks = detail::clamp_blocks(wanted, static_cast<uint64_t>(lanes_of(r)));
    if (has_few_blocks(r)) {
      plan.threads = row_of(plan.algorithm).stages > 1 ? kLaneBound : kLaneBlock;
      plan.width = detail::width_of(r, plan.blocks, row_of(r.collective).counted ? ~0ull : work);
      // As with other calls, the blocks of another communicator must fit beside these.
      plan.bulk = 2 * plan.blocks <= r.capabilities.bulk_blocks;
    }
    return plan;
  }
  // Small blocks spread a small call over the device; large ones fill the links.
  const bool push = pushes_into_slots(plan.algorithm);
  plan.threads = kFullBlock;
  if (push) {
    plan.threads = work <= 16384 ? 64 : work <= 32768 ? 128 : work <= 65536 ? 256 : kFullBlock;
  }
  if (r.threads > 0) plan.threads = r.threads;
  // For kernels that push, proportionally more blocks of a smaller size are resident at once. This
  // is not known for other kernels.
  const int blocks = push ? (r.room + r.spare_room) * (kFullBlock / plan.threads) : r.room;
  const uint64_t room = detail::room_of(r, plan.algorithm, static_cast<uint64_t>(blocks));
  // The grids of kernels that do not push must be equal, but only the two ranks of a counted
  // message know its length.
  const bool counted = !push && row_of(r.collective).counted;
  const uint64_t wanted =
      counted ? room : ceil_div<uint64_t>(work, static_cast<uint64_t>(plan.threads));
  plan.blocks = detail::clamp_blocks(wanted, room);
  return plan;
}

}  // namespace collx
