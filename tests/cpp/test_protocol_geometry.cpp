// Tests that sender and receiver agree on the messages of every collective, and that all messages
// together implement its definition.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "protocol/geometry.h"
#include "protocol/integer_divisor.h"
#include "protocol/names.h"

namespace collx {
namespace {

constexpr Collective kCollectives[] = {
    Collective::reducescatter, Collective::allgather, Collective::broadcast, Collective::reduce,
    Collective::gather,        Collective::scatter,   Collective::alltoall};

/// The unsplit tensor and the number of ranks that split it.
struct Shape {
  Geometry geometry;
  int world;

  MessageMap messages(Collective c, int root) const {
    return {{.collective = c, .root = root}, geometry, world};
  }
};

std::vector<Shape> shapes(Collective c) {
  std::vector<Shape> all;
  for (const int world : {1, 2, 3, 4, 8, 16}) {
    const auto w = static_cast<uint64_t>(world);
    const bool axis = c == Collective::reducescatter || c == Collective::allgather;
    const bool equal =
        c == Collective::gather || c == Collective::scatter || c == Collective::alltoall;
    for (const uint64_t outer : {1, 3}) {
      if (outer != 1 && !axis) continue;
      for (const uint64_t units : {uint64_t{0}, uint64_t{1}, w - 1, w, w + 1, 5 * w + 2, 6 * w}) {
        if (equal && units % w != 0) continue;
        for (const uint64_t inner : {0, 1, 6}) all.push_back({{outer, units, inner}, world});
      }
    }
  }
  return all;
}

template <typename Visit>
void for_each_pair(Visit visit) {
  for (const Collective c : kCollectives) {
    for (const Shape& s : shapes(c)) {
      for (int from = 0; from < s.world; ++from) {
        for (int to = 0; to < s.world; ++to) visit(c, s, has_root(c) ? s.world / 2 : -1, from, to);
      }
    }
  }
}

/// Returns the offsets of the bytes of a message, in order.
std::vector<uint64_t> bytes_of(const Span& span) {
  std::vector<uint64_t> offsets;
  for (uint64_t row = 0; row < span.rows; ++row) {
    for (uint64_t b = 0; b < span.width; ++b) offsets.push_back(span.offset + row * span.pitch + b);
  }
  return offsets;
}

TEST(Exchange, both_ends_agree_on_the_length_of_a_message) {
  for_each_pair([](Collective c, const Shape& s, int root, int from, int to) {
    const Span sent = s.messages(c, root).sent(from, to);
    const Span received = s.messages(c, root).received(from, to);
    EXPECT_EQ(sent.bytes(), received.bytes()) << name_of(c) << ' ' << from << " to " << to;
    EXPECT_EQ(bytes_of(sent).size(), sent.bytes());
  });
}

TEST(Exchange, a_message_exists_where_the_collective_has_one) {
  for_each_pair([](Collective c, const Shape& s, int root, int from, int to) {
    if (has_message(c, root, from, to)) return;
    EXPECT_EQ(s.messages(c, root).sent(from, to).bytes(), 0u) << name_of(c);
    EXPECT_EQ(s.messages(c, root).received(from, to).bytes(), 0u) << name_of(c);
  });
}

/// Returns the label of byte (o, u, b) of an unsplit tensor that belongs to `rank`.
uint64_t label(int rank, uint64_t o, uint64_t u, uint64_t b) {
  return ((uint64_t(rank) * 100 + o) * 100 + u) * 100 + b;
}

using Labels = std::vector<uint64_t>;

/// Returns a tensor with the units [part] of each row, in row-major order.
Labels tensor(const Geometry& g, Part part, int rank) {
  Labels labels;
  for (uint64_t o = 0; o < g.outer; ++o) {
    for (uint64_t u = part.start; u < part.start + part.count; ++u) {
      for (uint64_t b = 0; b < g.inner; ++b) labels.push_back(label(rank, o, u, b));
    }
  }
  return labels;
}

constexpr bool splits_output(Collective c) {
  return c == Collective::allgather || c == Collective::gather;
}

Labels input_of(Collective c, const Shape& s, int rank) {
  const Part own = partition(s.geometry.units, s.world, rank);
  const Part all{0, s.geometry.units};
  return tensor(s.geometry, splits_output(c) ? own : all, rank);
}

/// The bytes that rank `to` must get from rank `from`: pairs of output offset and label.
using Placed = std::vector<std::pair<uint64_t, uint64_t>>;

Placed carried(Collective c, const Shape& s, int root, int from, int to) {
  const std::vector<uint64_t> source = bytes_of(s.messages(c, root).sent(from, to));
  const std::vector<uint64_t> target = bytes_of(s.messages(c, root).received(from, to));
  const Labels input = input_of(c, s, from);
  Placed placed;
  for (size_t i = 0; i < source.size(); ++i) {
    EXPECT_LT(source[i], input.size()) << name_of(c) << ": reads beyond its input";
    placed.emplace_back(target[i], input.at(source[i]));
  }
  return placed;
}

Placed meant(Collective c, const Shape& s, int root, int from, int to) {
  const Geometry& g = s.geometry;
  const Part of_sender = partition(g.units, s.world, from);
  const Part of_receiver = partition(g.units, s.world, to);
  const bool to_root = c != Collective::gather || to == root;
  const bool from_root = (c != Collective::broadcast && c != Collective::scatter) || from == root;
  const bool in_reduce = c != Collective::reduce || to == root || from == to;
  if (!to_root || !from_root || !in_reduce) return {};
  const bool one_part = c == Collective::reducescatter || c == Collective::scatter;
  Placed placed;
  for (uint64_t o = 0; o < g.outer; ++o) {
    for (uint64_t u = 0; u < g.units; ++u) {
      const bool senders = u >= of_sender.start && u < of_sender.start + of_sender.count;
      const bool receivers = u >= of_receiver.start && u < of_receiver.start + of_receiver.count;
      if (splits_output(c) && !senders) continue;
      if ((one_part || c == Collective::alltoall) && !receivers) continue;
      uint64_t row = u, width = g.units;  // of the output
      if (one_part) {
        row = u - of_receiver.start;
        width = of_receiver.count;
      } else if (c == Collective::alltoall) {
        row = of_sender.start + u - of_receiver.start;
      }
      for (uint64_t b = 0; b < g.inner; ++b) {
        placed.emplace_back((o * width + row) * g.inner + b, label(from, o, u, b));
      }
    }
  }
  return placed;
}

TEST(Exchange, every_byte_goes_where_the_collective_puts_it) {
  for_each_pair([](Collective c, const Shape& s, int root, int from, int to) {
    EXPECT_EQ(carried(c, s, root, from, to), meant(c, s, root, from, to))
        << name_of(c) << " of " << s.geometry.outer << " x " << s.geometry.units << " x "
        << s.geometry.inner << " on " << s.world << " from " << from << " to " << to;
  });
}

// Negative control: a message at another rank's place is noticed.
TEST(Exchange, a_part_of_the_wrong_rank_is_noticed) {
  const Shape s{{1, 4, 1}, 2};
  EXPECT_NE(carried(Collective::allgather, s, -1, 0, 1), meant(Collective::allgather, s, -1, 1, 0));
}

TEST(Exchange, spans_are_dense_where_there_is_one_row) {
  static_assert(dense_span(12).bytes() == 12 && dense_span(0).rows == 0);
  static_assert(part_span({2, 5, 3}, 2, 1).offset == 9 && part_span({2, 5, 3}, 2, 1).pitch == 15);
  static_assert(part_span({2, 5, 3}, 2, 1).width == 6 && part_span({2, 5, 3}, 2, 1).rows == 2);
  static_assert(Geometry{2, 5, 3}.bytes() == 30 && Geometry{2, 5, 3}.part_bytes(2, 0) == 18);
}

TEST(Exchange, a_divisor_gives_the_quotients_of_division) {
  constexpr uint64_t kMost = ~uint64_t{0};
  std::vector<uint64_t> divisors{1, 2, 3, 5, 6, 7, 10, 48, 4096, 12288, 1000003, kMost / 3, kMost};
  for (int bit = 4; bit < 64; ++bit) {
    const uint64_t power = uint64_t{1} << bit;
    divisors.insert(divisors.end(), {power - 1, power, power + 1});
  }
  for (const uint64_t divisor : divisors) {
    const IntegerDivisor by(divisor);
    std::vector<uint64_t> values{0, 1, kMost, kMost - 1, kMost / 2, 0x123456789abcdef0};
    for (const uint64_t times : {uint64_t{1}, uint64_t{2}, uint64_t{1000}, kMost / divisor}) {
      if (times > kMost / divisor) continue;
      const uint64_t multiple = times * divisor;
      values.insert(values.end(), {multiple - 1, multiple, multiple + 1});
    }
    for (const uint64_t value : values) {
      EXPECT_EQ(by.quotient(value), value / divisor) << value << " / " << divisor;
    }
  }
}

TEST(Exchange, counted_messages_lie_one_behind_the_other) {
  constexpr MessageMap messages{
      {.collective = Collective::alltoallv}, {}, 4, {3, 0, 5, 1}, {0, 2, 7, 0}};
  constexpr int kOwn = 2;
  EXPECT_EQ(bytes_of(messages.sent(kOwn, 0)), (std::vector<uint64_t>{0, 1, 2}));
  EXPECT_EQ(messages.sent(kOwn, 1).bytes(), 0u);
  EXPECT_EQ(bytes_of(messages.sent(kOwn, 2)), (std::vector<uint64_t>{3, 4, 5, 6, 7}));
  EXPECT_EQ(bytes_of(messages.sent(kOwn, 3)), (std::vector<uint64_t>{8}));
  EXPECT_EQ(messages.received(0, kOwn).bytes(), 0u);
  EXPECT_EQ(bytes_of(messages.received(1, kOwn)), (std::vector<uint64_t>{0, 1}));
  EXPECT_EQ(messages.received(2, kOwn).offset, 2u);
  EXPECT_EQ(messages.received(3, kOwn).bytes(), 0u);
}

TEST(Exchange, kinds_are_as_the_collectives_are) {
  for (const Collective c : kCollectives) {
    const MessageMap messages{{.collective = c, .root = 1}, {1, 8, 2}, 4};
    bool same = true, one_way = false;
    for (int from = 0; from < 4; ++from) {
      for (int to = 0; to < 4; ++to) {
        if (from == to) continue;
        one_way = one_way || !has_message(c, 1, from, to);
        const Span span = messages.sent(from, to);
        const Span other = messages.sent(from, from == 3 ? 0 : 3);
        same = same && (span.bytes() == 0 || other.bytes() == 0 || span.offset == other.offset);
      }
    }
    EXPECT_EQ(sends_the_same(c), same) << name_of(c);
    EXPECT_EQ(is_one_way(c), one_way) << name_of(c);
  }
  EXPECT_TRUE(is_one_way(Collective::alltoallv));
  EXPECT_FALSE(is_one_way(Collective::allreduce));
}

}  // namespace
}  // namespace collx
