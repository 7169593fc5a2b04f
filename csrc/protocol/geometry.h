// The messages between ranks in every collective except all-reduce, as pure functions of the shape
// and of the counts that ranks specify.
//
// The unsplit tensor (the input of reducescatter, scatter and alltoall; the output of allgather and
// gather) is viewed as [outer, units, inner]. partition.h divides `units` among the ranks.
#pragma once

#include "collectives.h"
#include "partition.h"
#include "types.h"

namespace collx {

/// A strided range of a tensor: `rows` runs of `width` bytes, `pitch` bytes from run to run.
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

/// The splits of an alltoallv in device memory: int64[world], in rows.
struct DeviceSplits {
  const int64_t* sent = nullptr;
  int64_t* received = nullptr;
  uint64_t row_bytes = 0;
  uint64_t rows = 0;      // of the input
  uint64_t capacity = 0;  // rows of the output; those after the received rows are set to zero
  int32_t lanes = 0;      // CUDA: lanes that long messages may use
};

constexpr Span dense_span(uint64_t bytes) { return {0, bytes > 0 ? 1u : 0u, bytes, bytes}; }

/// The part of a rank within the unsplit tensor.
constexpr Span part_span(const Geometry& g, int world, int rank) {
  const Part part = partition(g.units, world, rank);
  const uint64_t width = part.count * g.inner;
  if (width == 0) return {};
  return {part.start * g.inner, g.outer, width, g.units * g.inner};
}

/// Whether `from` sends a message to `to`. A rank's message to itself is the data that it keeps.
constexpr bool has_message(Collective c, int root, int from, int to) {
  switch (row_of(c).root) {
    case Root::sends: return from == root;
    case Root::receives: return to == root || (row_of(c).reduces && from == to);
    case Root::none: break;
  }
  return true;
}

/// The messages of a call, and the location of each in the tensors of its two ranks.
struct MessageMap : CallCore {
  Geometry geometry;
  int32_t world = 1;
  // For a collective with counts that the host knows: bytes to and from each rank. This rank only
  // knows the counts of its own messages.
  uint64_t sends[kMaxRanks] = {};
  uint64_t expects[kMaxRanks] = {};

  /// The message within the sender's input.
  constexpr Span sent(int from, int to) const {
    if (row_of(collective).counted) return counted_span(sends, to);
    return span(row_of(collective).input, from, to, from, to);
  }
  /// The message within the receiver's output.
  constexpr Span received(int from, int to) const {
    if (row_of(collective).counted) return counted_span(expects, from);
    return span(row_of(collective).output, from, to, to, from);
  }

 private:
  /// The message within a tensor of rank `own`, which is `from` or `to`.
  constexpr Span span(Extent tensor, int from, int to, int own, int other) const {
    if (!has_message(collective, root, from, to)) return {};
    switch (tensor) {
      case Extent::divided: return part_span(geometry, world, other);
      case Extent::part: return dense_span(geometry.part_bytes(world, own));
      case Extent::whole: break;
    }
    return dense_span(geometry.bytes());
  }
  static constexpr Span counted_span(const uint64_t* bytes, int rank) {
    Span span = dense_span(bytes[rank]);
    for (int r = 0; r < rank; ++r) span.offset += bytes[r];
    return span;
  }
};

/// Bytes of the longest message between two ranks.
constexpr uint64_t longest_message(Collective c, const Geometry& g, int world) {
  return sends_all(c) ? g.bytes() : g.part_bytes(world, 0);  // low ranks have the long parts
}

}  // namespace collx
