// One row for each algorithm, with its properties. Everything else is derived from the rows.
#pragma once

#include "collectives.h"
#include "types.h"

namespace collx {

/// The memory of the region through which ranks pass data, in parts that hold what each rank sends
/// to each.
enum class SlotsFor : uint8_t { none, oneshot, twoshot, channels };

/// The part of a call's data that a grid processes once and a slot holds, with masks if there are
/// some, if the call is not done in several uses.
enum class Share : uint8_t {
  none,
  tensor,   // the whole tensor
  part,     // that of one rank
  message,  // the longest between two ranks
  slice,    // of that, what each rank but the root passes on
};

/// What carries a call out: kernels, the copy engines of the devices, or the process group. Of the
/// last two csrc/ops/enqueue.cpp has the steps of the host.
enum class By : uint8_t { kernels, copy_engines, group };

struct AlgorithmRow {
  Algorithm algorithm;
  const char* name;
  Collectives serves = 0;  // those that can ask for it by name
  Share share = Share::none;
  SlotsFor slots = SlotsFor::none;  // without them, lanes or barriers
  int stages = 1;                   // how often data passes through slots or lanes
  bool lanes = false;
  bool staging = false;    // inputs are pulled by peers: from there, where not symmetric
  bool results = false;    // so are results
  bool in_place = false;   // peers touch the tensors, which are symmetric
  bool multicast = false;  // only on GPUs whose memory has a multicast address
  bool by_switch = false;  // and what is reduced is reduced there, in an order of its own
  bool on_cpu = true;
  By by = By::kernels;
};

inline constexpr Collectives kReducesAll = only(Collective::allreduce) | kNorms;
inline constexpr Collectives kBarrier = only(Collective::barrier);
inline constexpr Collectives kBroadcast = only(Collective::broadcast);
inline constexpr Collectives kPairs = kExchanges & ~kBroadcast;
/// Every rank can compute where its messages are in the outputs of the others.
inline constexpr Collectives kDirectCopies =
    kExchanges &
    collectives_where([](const CollectiveRow& row) { return !row.reduces && !row.counted; });

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
     .serves = only(Collective::allreduce),
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
     .serves = only(Collective::allreduce),
     .share = Share::tensor,
     .staging = true,
     .multicast = true,
     .by_switch = true,
     .on_cpu = false},
    // Results go through the memory for inputs, each to the place of the inputs that it is made of.
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
     .serves = only(Collective::allreduce),
     .share = Share::part,
     .staging = true,
     .multicast = true,
     .on_cpu = false},
    {.algorithm = Algorithm::fallback,
     .name = "fallback",
     .serves = kWithTensors | kBarrier,
     .by = By::group},
    // Messages through slots, or between the tensors themselves.
    {.algorithm = Algorithm::staged,
     .name = "staged",
     .serves = kPairs | kScatteringNorms,
     .share = Share::message,
     .slots = SlotsFor::twoshot},
    {.algorithm = Algorithm::direct,
     .name = "direct",
     .serves = (kPairs & ~only(Collective::alltoallv)) | kBarrier,
     .share = Share::message,
     .in_place = true},
    // What all ranks get alike, or what is made of all of theirs.
    {.algorithm = Algorithm::multimem,
     .name = "multimem",
     .serves = only(Collective::reducescatter) | only(Collective::reduce) |
               only(Collective::allgather) | kBroadcast,
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
     .serves = only(Collective::allreduce),
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

/// A set of algorithms, a bit each.
using Algorithms = uint32_t;
constexpr Algorithms only(Algorithm a) { return Algorithms{1} << static_cast<int>(a); }

/// Whether a collective can ask for it.
constexpr bool has_algorithm(Collective c, Algorithm a) {
  return (row_of(a).serves & only(c)) != 0;
}

constexpr bool has_kernels(Algorithm a) { return row_of(a).by == By::kernels; }
constexpr bool needs_symmetric(Algorithm a) { return row_of(a).in_place; }
constexpr bool pushes_into_slots(Algorithm a) { return row_of(a).slots != SlotsFor::none; }
/// Peers read the inputs, where they lie or where their owner has staged them.
constexpr bool pulls_inputs(Algorithm a) { return row_of(a).staging; }

constexpr bool needs_multicast(Algorithm a) { return row_of(a).multicast; }
/// What comes from the ranks comes as their sum, in the order of the switch.
constexpr bool adds_by_multicast(Collective c, Algorithm a) {
  return row_of(a).by_switch && reduces(c);
}
/// Something is stored to all ranks at once: reduced parts, or messages that all of them get.
constexpr bool stores_by_multicast(Collective c, Algorithm a) {
  return row_of(a).multicast && (row_of(a).share == Share::part || !reduces(c));
}

/// What NVLink multicast adds up as the other algorithms do, but for the order of the ranks. Not
/// the average of 16-bit floats, whose sums it has rounded already; nor max and min, whose NaN and
/// zeros are other ones there; nor what it has no instruction for.
constexpr bool sums_by_multicast(ReduceOp op, DType dtype) {
  switch (dtype) {
    case DType::float32:
      return op == ReduceOp::sum || op == ReduceOp::avg;
    case DType::float16:
    case DType::bfloat16:
    case DType::int32:
    case DType::int64:
      return op == ReduceOp::sum;
    case DType::float64:
    case DType::int8:
    case DType::uint8:
    case DType::count:
      break;
  }
  return false;
}
constexpr bool is_summed(DType dtype) { return sums_by_multicast(ReduceOp::sum, dtype); }

/// Words in slots that cannot give up a pattern as sentinel, and travel with masks: of integers,
/// and of copies, whose bits are of any kind.
constexpr bool is_masked(Collective c, DType dtype) { return !reduces(c) || !has_sentinel(dtype); }

}  // namespace collx
