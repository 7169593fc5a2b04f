// What each rank sends to each in every collective but all-reduce: pure functions of the shape.
//
// The unsplit tensor (reducescatter, scatter, alltoall: an input; allgather, gather: an output) is
// seen as [outer, units, inner]: `units` are divided among the ranks by partition.h.
#pragma once

#include "partition.h"
#include "types.h"

namespace collx {

/// Bytes of a tensor: `rows` runs of `width` bytes, `pitch` bytes from run to run.
struct Span {
  uint64_t offset = 0;
  uint64_t rows = 0;
  uint64_t width = 0;
  uint64_t pitch = 0;

  COLLX_HD constexpr uint64_t bytes() const { return rows * width; }
};

struct Geometry {
  uint64_t outer = 1;
  uint64_t units = 0;
  uint64_t inner = 0;  // bytes

  COLLX_HD constexpr uint64_t bytes() const { return outer * units * inner; }
  COLLX_HD constexpr uint64_t part_bytes(int world, int rank) const {
    return outer * partition(units, world, rank).count * inner;
  }
};

/// alltoallv whose splits lie in device memory: int64[world], in rows.
struct DeviceSplits {
  const int64_t* sent = nullptr;
  int64_t* received = nullptr;
  uint64_t row_bytes = 0;
  uint64_t rows = 0;      // of the input
  uint64_t capacity = 0;  // rows of the output; those behind the received ones are set to zero
};

/// Some pair of ranks exchanges nothing in one direction, or may do so.
COLLX_HD constexpr bool is_one_way(Collective c) {
  return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather ||
         c == Collective::scatter || c == Collective::alltoallv;
}

COLLX_HD constexpr bool is_reduction(Collective c) {
  return c == Collective::allreduce || c == Collective::reducescatter || c == Collective::reduce;
}

/// A reduction fused with a normalization of its rows.
COLLX_HD constexpr bool is_norm(Collective c) {
  return c >= Collective::allreduce_rmsnorm && c < Collective::count;
}

/// One of those in which each rank gets its part of the rows alone.
COLLX_HD constexpr bool scatters_rows(Collective c) {
  return c == Collective::reducescatter_residual_rmsnorm ||
         c == Collective::reducescatter_residual_rmsnorm_fp8;
}

COLLX_HD constexpr bool has_root(Collective c) {
  return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather ||
         c == Collective::scatter;
}

/// Every rank sends the same bytes to all that it sends to.
COLLX_HD constexpr bool sends_the_same(Collective c) {
  return c == Collective::allgather || c == Collective::broadcast || c == Collective::gather ||
         c == Collective::reduce;
}

constexpr Span dense_span(uint64_t bytes) { return {0, bytes > 0 ? 1u : 0u, bytes, bytes}; }

/// The part of a rank inside of the unsplit tensor.
constexpr Span part_span(const Geometry& g, int world, int rank) {
  const Part part = partition(g.units, world, rank);
  const uint64_t width = part.count * g.inner;
  if (width == 0) return {};
  return {part.start * g.inner, g.outer, width, g.units * g.inner};
}

/// Whether a message goes from one rank to another. A rank's message to itself is what it keeps.
constexpr bool has_message(Collective c, int root, int from, int to) {
  switch (c) {
    case Collective::broadcast:
    case Collective::scatter:
      return from == root;
    case Collective::gather:
      return to == root;
    case Collective::reduce:
      return to == root || from == to;  // who is not the root keeps its own values
    default:
      return true;
  }
}

/// The message inside of the sender's input. Not for alltoallv.
constexpr Span sent_span(Collective c, const Geometry& g, int world, int root, int from, int to) {
  if (!has_message(c, root, from, to)) return {};
  switch (c) {
    case Collective::reducescatter:
    case Collective::scatter:
    case Collective::alltoall:
      return part_span(g, world, to);
    case Collective::allgather:
    case Collective::gather:
      return dense_span(g.part_bytes(world, from));
    default:
      return dense_span(g.bytes());
  }
}

/// The message inside of the receiver's output. Not for alltoallv.
constexpr Span received_span(Collective c, const Geometry& g, int world, int root, int from,
                             int to) {
  if (!has_message(c, root, from, to)) return {};
  switch (c) {
    case Collective::allgather:
    case Collective::gather:
    case Collective::alltoall:
      return part_span(g, world, from);
    case Collective::reducescatter:
    case Collective::scatter:
      return dense_span(g.part_bytes(world, to));
    default:
      return dense_span(g.bytes());
  }
}

}  // namespace collx
