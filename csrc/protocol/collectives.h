// One row for each collective, with its properties. Everything else is derived from the rows.
#pragma once

#include "types.h"

namespace collx {

/// How a rank's tensor relates to its messages.
enum class Extent : uint8_t {
  whole,    // the tensor is the message
  part,     // the tensor is the message, and one rank's part of the unsplit tensor
  divided,  // the tensor is unsplit; each message is the part of the other rank
};

enum class Root : uint8_t { none, sends, receives };

enum class Quantized : uint8_t { no, fp8, int8 };

struct CollectiveRow {
  Collective collective;
  const char* name;
  Extent input = Extent::whole;
  Extent output = Extent::whole;
  Root root = Root::none;
  bool reduces = false;  // received data is reduced; ranks other than the root keep their values
  bool counted = false;  // each rank specifies how much it sends to each other rank
  // A reduction fused with a normalization of its rows:
  bool norm = false;
  bool layer_norm = false;  // otherwise RMS
  bool residual = false;    // added before the norm; the sum is also a result
  bool scatters = false;    // each rank only gets its part of the rows
  Quantized quantized = Quantized::no;
};

inline constexpr CollectiveRow kCollectives[] = {
    {Collective::none, "none"},
    {.collective = Collective::allreduce, .name = "allreduce", .reduces = true},
    {.collective = Collective::reducescatter,
     .name = "reducescatter",
     .input = Extent::divided,
     .output = Extent::part,
     .reduces = true},
    {.collective = Collective::allgather,
     .name = "allgather",
     .input = Extent::part,
     .output = Extent::divided},
    {.collective = Collective::broadcast, .name = "broadcast", .root = Root::sends},
    {.collective = Collective::reduce, .name = "reduce", .root = Root::receives, .reduces = true},
    {.collective = Collective::gather,
     .name = "gather",
     .input = Extent::part,
     .output = Extent::divided,
     .root = Root::receives},
    {.collective = Collective::scatter,
     .name = "scatter",
     .input = Extent::divided,
     .output = Extent::part,
     .root = Root::sends},
    {.collective = Collective::alltoall,
     .name = "alltoall",
     .input = Extent::divided,
     .output = Extent::divided},
    {.collective = Collective::alltoallv,
     .name = "alltoallv",
     .input = Extent::divided,
     .output = Extent::divided,
     .counted = true},
    {Collective::barrier, "barrier"},
    {.collective = Collective::allreduce_rmsnorm, .name = "allreduce_rmsnorm", .norm = true},
    {.collective = Collective::allreduce_residual_rmsnorm,
     .name = "allreduce_residual_rmsnorm",
     .norm = true,
     .residual = true},
    {.collective = Collective::allreduce_rmsnorm_fp8,
     .name = "allreduce_rmsnorm_fp8",
     .norm = true,
     .quantized = Quantized::fp8},
    {.collective = Collective::allreduce_residual_rmsnorm_fp8,
     .name = "allreduce_residual_rmsnorm_fp8",
     .norm = true,
     .residual = true,
     .quantized = Quantized::fp8},
    {.collective = Collective::allreduce_rmsnorm_int8,
     .name = "allreduce_rmsnorm_int8",
     .norm = true,
     .quantized = Quantized::int8},
    {.collective = Collective::allreduce_residual_rmsnorm_int8,
     .name = "allreduce_residual_rmsnorm_int8",
     .norm = true,
     .residual = true,
     .quantized = Quantized::int8},
    {.collective = Collective::allreduce_layernorm,
     .name = "allreduce_layernorm",
     .norm = true,
     .layer_norm = true},
    {.collective = Collective::allreduce_residual_layernorm,
     .name = "allreduce_residual_layernorm",
     .norm = true,
     .layer_norm = true,
     .residual = true},
    {.collective = Collective::reducescatter_residual_rmsnorm,
     .name = "reducescatter_residual_rmsnorm",
     .input = Extent::divided,
     .output = Extent::part,
     .norm = true,
     .residual = true,
     .scatters = true},
    {.collective = Collective::reducescatter_residual_rmsnorm_fp8,
     .name = "reducescatter_residual_rmsnorm_fp8",
     .input = Extent::divided,
     .output = Extent::part,
     .norm = true,
     .residual = true,
     .scatters = true,
     .quantized = Quantized::fp8},
#if defined(COLLX_EXTRA_COLLECTIVES)
    COLLX_EXTRA_COLLECTIVES
#endif
};

inline constexpr size_t kCollectiveCount = sizeof(kCollectives) / sizeof(kCollectives[0]);

constexpr const CollectiveRow& row_of(Collective c) { return kCollectives[static_cast<size_t>(c)]; }

constexpr bool is_reduction(Collective c) { return row_of(c).reduces; }
constexpr bool is_norm(Collective c) { return row_of(c).norm; }
/// The collective computes new values from those of the ranks. All others copy values.
constexpr bool reduces(Collective c) { return is_reduction(c) || is_norm(c); }
constexpr bool scatters_rows(Collective c) { return row_of(c).scatters; }
constexpr bool has_root(Collective c) { return row_of(c).root != Root::none; }

/// The collective moves data, which a barrier does not.
constexpr bool has_tensors(Collective c) {
  return c != Collective::none && c != Collective::barrier;
}

/// Some pair of ranks may exchange no data in one direction.
constexpr bool is_one_way(Collective c) { return has_root(c) || row_of(c).counted; }

/// Every rank sends the same bytes to all its receivers.
constexpr bool sends_the_same(Collective c) { return row_of(c).input != Extent::divided; }

/// A message is the whole unsplit tensor.
constexpr bool sends_all(Collective c) {
  return row_of(c).input == Extent::whole && row_of(c).output == Extent::whole;
}

/// The result has the input's shape.
constexpr bool keeps_shape(Collective c) {
  return row_of(c).input == row_of(c).output && !row_of(c).counted;
}

/// The unsplit tensor is divided along an axis into one part for each rank. Parts may have any
/// length. If there is a root, or if input and output are both divided, the parts are equal and
/// the axis is the first.
constexpr bool has_parts(Collective c) { return !sends_all(c) && !row_of(c).counted; }
constexpr bool has_equal_parts(Collective c) {
  return has_parts(c) && (has_root(c) || keeps_shape(c));
}

/// The tensors that peers access in place if they are symmetric.
struct Touched {
  bool input;
  bool output;
};
constexpr Touched touched(Collective c) {
  const CollectiveRow& row = row_of(c);
  if (c == Collective::allreduce) return {true, true};
  return {row.reduces || row.norm, !row.reduces && !row.norm};
}

/// A set of collectives, with one bit for each.
using Collectives = uint64_t;
constexpr Collectives only(Collective c) { return Collectives{1} << static_cast<int>(c); }

template <typename F>
constexpr Collectives collectives_where(F f) {
  Collectives found = 0;
  for (const CollectiveRow& row : kCollectives) {
    if (f(row)) found |= only(row.collective);
  }
  return found;
}

inline constexpr Collectives kWithTensors =
    collectives_where([](const CollectiveRow& row) { return has_tensors(row.collective); });
/// Fused normalizations: kNorms normalize all rows on every rank, kScatteringNorms only the rank's
/// part of the rows.
inline constexpr Collectives kNorms =
    collectives_where([](const CollectiveRow& row) { return row.norm && !row.scatters; });
inline constexpr Collectives kScatteringNorms =
    collectives_where([](const CollectiveRow& row) { return row.scatters; });
/// Messages between pairs of ranks, which the receiver may reduce.
inline constexpr Collectives kExchanges = collectives_where([](const CollectiveRow& row) {
  return has_tensors(row.collective) && !row.norm && row.collective != Collective::allreduce;
});
/// Each rank specifies how much it sends to each other rank.
inline constexpr Collectives kCounted =
    collectives_where([](const CollectiveRow& row) { return row.counted; });

/// If the output is the input, messages cannot pass directly between the tensors: every rank would
/// overwrite data that peers still need.
constexpr bool overwrites_in_place(Collective c) {
  return (kExchanges & only(c)) != 0 && keeps_shape(c) && !has_root(c);
}

namespace detail {
constexpr bool same_text(const char* a, const char* b) {
  for (; *a != 0 && *a == *b; ++a, ++b) {
  }
  return *a == *b;
}

/// Each row's index is its value, and names are unique.
template <typename Row, size_t N, typename E>
constexpr bool is_table(const Row (&rows)[N], E Row::*value) {
  for (size_t i = 0; i < N; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (same_text(rows[i].name, rows[j].name)) return false;
    }
  }
  return stand_at_their_values(rows, value);
}
}  // namespace detail

static_assert(detail::is_table(kCollectives, &CollectiveRow::collective));
static_assert(kCollectiveCount >= static_cast<size_t>(Collective::count));

}  // namespace collx
