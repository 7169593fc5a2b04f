// One row for each algorithm, with its properties. Everything else is derived from the rows.
#pragma once

#include "collectives.h"
#include "types.h"

namespace collx {

/// The slot area of the region that an algorithm uses. Each slot holds the data that one rank sends
/// to another.
enum class SlotsFor : uint8_t { none, oneshot, twoshot, channels };

/// The part of a call's data that the grid processes in one pass, and that a slot holds (with its
/// masks, if any), when the call fits into a single use.
enum class Share : uint8_t {
  none,
  tensor,   // the whole tensor
  part,     // the part of one rank
  message,  // the longest message between two ranks
  slice,    // the part of that message that each rank except the root passes on
};

/// What executes a call: kernels, the copy engines of the devices, or the process group.
/// csrc/ops/enqueue.cpp has the host code for the last two.
enum class By : uint8_t { kernels, copy_engines, group };

struct AlgorithmRow {
  Algorithm algorithm;
  const char* name;
  Collectives serves = 0;  // collectives that can request it by name
  Share share = Share::none;
  SlotsFor slots = SlotsFor::none;  // none: the algorithm uses lanes or barriers
  int stages = 1;                   // how often data passes through slots or lanes
  bool lanes = false;
  bool staging = false;    // peers pull inputs, from the staging memory if they are not symmetric
  bool results = false;    // peers pull results
  bool in_place = false;   // peers access the tensors directly, so these must be symmetric
  bool multicast = false;  // requires GPU memory with a multicast address
  bool by_switch = false;  // the switch performs reductions, in its own order
  bool on_cpu = true;
  By by = By::kernels;
};

inline constexpr Collectives kAllreduce = only(Collective::allreduce);
inline constexpr Collectives kReducesAll = kAllreduce | kNorms;
inline constexpr Collectives kBarrier = only(Collective::barrier);
inline constexpr Collectives kBroadcast = only(Collective::broadcast);
inline constexpr Collectives kPairs = kExchanges & ~kBroadcast;
inline constexpr Collectives kReduce = only(Collective::reduce);
inline constexpr Collectives kReductions =
    kPairs & collectives_where([](const CollectiveRow& row) { return row.reduces; });
/// Exchanges in which every rank can compute the place of its messages in the outputs of others.
inline constexpr Collectives kDirectCopies = kExchanges & ~kReductions & ~kCounted;

inline constexpr AlgorithmRow kAlgorithms[] = {
    {.algorithm = Algorithm::automatic, .name = "auto", .serves = kWithTensors | kBarrier},
    {.algorithm = Algorithm::oneshot_push,
     .name = "oneshot_push",
     .serves = kReducesAll,
     .share = Share::tensor,
     .slots = SlotsFor::oneshot},
    {.algorithm = Algorithm::twoshot_push,
     .name = "twoshot_push",
     .serves = kReducesAll,
     .share = Share::part,
     .slots = SlotsFor::twoshot,
     .stages = 2},
    {.algorithm = Algorithm::pull_push,
     .name = "pull_push",
     .serves = kAllreduce,
     .share = Share::part,
     .in_place = true},
    {.algorithm = Algorithm::oneshot_pull,
     .name = "oneshot_pull",
     .serves = kReducesAll,
     .share = Share::tensor,
     .staging = true},
    {.algorithm = Algorithm::twoshot_pull,
     .name = "twoshot_pull",
     .serves = kReducesAll,
     .share = Share::part,
     .staging = true,
     .results = true},
    {.algorithm = Algorithm::multimem_oneshot,
     .name = "multimem_oneshot",
     .serves = kAllreduce,
     .share = Share::tensor,
     .staging = true,
     .multicast = true,
     .by_switch = true,
     .on_cpu = false},
    // Each result replaces, in the staging memory, the inputs from which it was reduced.
    {.algorithm = Algorithm::multimem_twoshot,
     .name = "multimem_twoshot",
     .serves = kReducesAll,
     .share = Share::part,
     .staging = true,
     .multicast = true,
     .by_switch = true,
     .on_cpu = false},
    {.algorithm = Algorithm::multimem_gather,
     .name = "multimem_gather",
     .serves = kAllreduce,
     .share = Share::part,
     .staging = true,
     .multicast = true,
     .on_cpu = false},
    {.algorithm = Algorithm::fallback,
     .name = "fallback",
     .serves = kWithTensors | kBarrier,
     .by = By::group},
    // Messages pass through slots, or directly between the tensors.
    {.algorithm = Algorithm::staged,
     .name = "staged",
     .serves = kPairs | kScatteringNorms,
     .share = Share::message,
     .slots = SlotsFor::twoshot},
    {.algorithm = Algorithm::direct,
     .name = "direct",
     .serves = kPairs | kBarrier,
     .share = Share::message,
     .in_place = true},
    // All ranks receive the same data, or the data of all ranks is reduced.
    {.algorithm = Algorithm::multimem,
     .name = "multimem",
     .serves = kReductions | only(Collective::allgather) | kBroadcast,
     .share = Share::message,
     .staging = true,
     .multicast = true,
     .by_switch = true,
     .on_cpu = false},
    {.algorithm = Algorithm::onestage,
     .name = "onestage",
     .serves = kBroadcast,
     .share = Share::message,
     .slots = SlotsFor::channels},
    {.algorithm = Algorithm::twostage,
     .name = "twostage",
     .serves = kBroadcast,
     .share = Share::part,
     .results = true},
    {.algorithm = Algorithm::pipelined,
     .name = "pipelined",
     .serves = kBroadcast,
     .share = Share::slice,
     .slots = SlotsFor::twoshot},
    {.algorithm = Algorithm::channels,
     .name = "channels",
     .share = Share::message,
     .slots = SlotsFor::channels,
     .on_cpu = false},
    {.algorithm = Algorithm::reduce_twostage,
     .name = "reduce_twostage",
     .share = Share::slice,
     .slots = SlotsFor::twoshot,
     .on_cpu = false},
    {.algorithm = Algorithm::twoshot_push_sums,
     .name = "twoshot_push_sums",
     .share = Share::part,
     .slots = SlotsFor::twoshot,
     .stages = 2,
     .on_cpu = false},
    {.algorithm = Algorithm::twoshot_lanes,
     .name = "twoshot_lanes",
     .serves = kAllreduce,
     .share = Share::part,
     .stages = 2,
     .lanes = true,
     .on_cpu = false},
    {.algorithm = Algorithm::lanes,
     .name = "lanes",
     .serves = kExchanges,
     .share = Share::message,
     .lanes = true,
     .on_cpu = false},
    {.algorithm = Algorithm::broadcast_lanes,
     .name = "broadcast_lanes",
     .share = Share::slice,
     .stages = 2,
     .lanes = true,
     .on_cpu = false},
    {.algorithm = Algorithm::copy_engine,
     .name = "copy_engine",
     .serves = kDirectCopies,
     .share = Share::message,
     .in_place = true,
     .on_cpu = false,
     .by = By::copy_engines},
#if defined(COLLX_EXTRA_ALGORITHMS)
    COLLX_EXTRA_ALGORITHMS
#endif
};

inline constexpr size_t kAlgorithmCount = sizeof(kAlgorithms) / sizeof(kAlgorithms[0]);
static_assert(detail::is_table(kAlgorithms, &AlgorithmRow::algorithm));
static_assert(kAlgorithmCount >= static_cast<size_t>(Algorithm::count));

constexpr const AlgorithmRow& row_of(Algorithm a) { return kAlgorithms[static_cast<size_t>(a)]; }

/// A set of algorithms, with one bit for each.
using Algorithms = uint32_t;
constexpr Algorithms only(Algorithm a) { return Algorithms{1} << static_cast<int>(a); }

/// Whether a collective can request the algorithm.
constexpr bool has_algorithm(Collective c, Algorithm a) {
  return (row_of(a).serves & only(c)) != 0;
}

constexpr bool has_kernels(Algorithm a) { return row_of(a).by == By::kernels; }
constexpr bool needs_symmetric(Algorithm a) { return row_of(a).in_place; }
constexpr bool pushes_into_slots(Algorithm a) { return row_of(a).slots != SlotsFor::none; }
/// Peers read the inputs, either in place or from the staging memory of their owner.
constexpr bool pulls_inputs(Algorithm a) { return row_of(a).staging; }

constexpr bool needs_multicast(Algorithm a) { return row_of(a).multicast; }
/// The switch adds the data of the ranks, in its own order.
constexpr bool adds_by_multicast(Collective c, Algorithm a) {
  return row_of(a).by_switch && reduces(c);
}
/// The algorithm stores to all ranks at once: reduced parts, or messages that all ranks receive.
constexpr bool stores_by_multicast(Collective c, Algorithm a) {
  return row_of(a).multicast && (row_of(a).share == Share::part || !reduces(c));
}

/// Whether NVLink multicast computes the same reduction as the other algorithms, except for the
/// order of the ranks. The average of 16-bit floats is excluded because the switch has already
/// rounded the sum. Max and min are excluded because the switch treats NaN and signed zeros
/// differently. So are combinations for which there is no instruction.
constexpr bool sums_by_multicast(ReduceOp op, DType dtype) {
  switch (dtype) {
    case DType::float32: return op == ReduceOp::sum || op == ReduceOp::avg;
    case DType::float16:
    case DType::bfloat16:
    case DType::int32:
    case DType::int64: return op == ReduceOp::sum;
    case DType::float64:
    case DType::int8:
    case DType::uint8:
    case DType::count: break;
  }
  return false;
}
constexpr bool is_summed(DType dtype) { return sums_by_multicast(ReduceOp::sum, dtype); }

/// Whether words in slots need masks because no bit pattern is free to serve as the sentinel. This
/// holds for integers, and for copies, which may contain any bits.
constexpr bool is_masked(Collective c, DType dtype) { return !reduces(c) || !has_sentinel(dtype); }

}  // namespace collx
