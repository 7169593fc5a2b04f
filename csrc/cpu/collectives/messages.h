// Messages within tensors: contiguous, or as the rows of a part of a tensor.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../protocol/geometry.h"
#include "collectives.h"

namespace collx::cpu {

/// The bytes of a message, with `pitch` bytes from row to row. A contiguous message has one endless
/// row.
template <typename Byte>
struct Rows {
  static constexpr uint64_t kEndless = ~0ull;

  Byte* first;
  uint64_t width = kEndless;
  uint64_t pitch = 0;

  bool dense() const { return width == kEndless; }
  Byte* at(uint64_t position) const {
    return dense() ? first + position : first + position / width * pitch + position % width;
  }
  uint64_t left_in_row(uint64_t position) const {
    return dense() ? kEndless : width - position % width;
  }
};
using Source = Rows<const char>;
using Target = Rows<char>;

template <typename Byte>
Rows<Byte> rows_of(Byte* tensor, const Span& span) {
  if (span.rows <= 1 || span.width == span.pitch) return {tensor + span.offset};
  return {tensor + span.offset, span.width, span.pitch};
}

namespace detail {

template <uint64_t kWidth>
void copy_narrow(char* to, uint64_t to_pitch, const char* from, uint64_t from_pitch,
                 uint64_t rows) {
  for (uint64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_pitch, from + r * from_pitch, kWidth);
}

inline void copy_rows(CopyKernel copy, char* to, uint64_t to_pitch, const char* from,
                      uint64_t from_pitch, uint64_t width, uint64_t rows) {
  switch (width) {
    case 1: return copy_narrow<1>(to, to_pitch, from, from_pitch, rows);
    case 2: return copy_narrow<2>(to, to_pitch, from, from_pitch, rows);
    case 4: return copy_narrow<4>(to, to_pitch, from, from_pitch, rows);
    case 8: return copy_narrow<8>(to, to_pitch, from, from_pitch, rows);
    case 16: return copy_narrow<16>(to, to_pitch, from, from_pitch, rows);
    default:
      for (uint64_t r = 0; r < rows; ++r) copy(to + r * to_pitch, from + r * from_pitch, width);
  }
}

}  // namespace detail

/// Copies `bytes` bytes from a position in one message to a position in another. It does nothing if
/// both positions have the same address.
inline void copy(CopyKernel kernel, Target to, uint64_t to_at, Source from, uint64_t from_at,
                 uint64_t bytes) {
  if (bytes == 0 || to.at(to_at) == from.at(from_at)) return;
  while (bytes > 0) {
    const uint64_t run = std::min({bytes, to.left_in_row(to_at), from.left_in_row(from_at)});
    // If the run is a whole row of the shorter row length, it starts a block of such rows. In this
    // case one side is dense, or both sides have the same row length.
    const uint64_t width = std::min(to.width, from.width);
    const bool alike = (to.dense() || to.width == width) && (from.dense() || from.width == width);
    uint64_t done = run;
    if (run == width && alike) {
      const uint64_t rows = bytes / width;
      done = rows * width;
      detail::copy_rows(kernel, to.at(to_at), to.dense() ? width : to.pitch, from.at(from_at),
                        from.dense() ? width : from.pitch, width, rows);
    } else {
      kernel(to.at(to_at), from.at(from_at), run);
    }
    to_at += done;
    from_at += done;
    bytes -= done;
  }
}

/// This rank's messages, by rank.
struct Messages {
  const Span* sent;      // in the input
  const Span* received;  // in the output; for store_messages, in the receivers' outputs
};

/// Stores the messages for other ranks, of at most `longest` bytes, into their outputs. Returns
/// false if a rank has failed.
bool store_messages(const ExchangeSession& session, const CallKernels& kernels, Messages messages,
                    uint64_t longest);

/// Copies the message from this rank to itself.
inline void keep_own(const ExchangeSession& session, CopyKernel kernel) {
  const int own = session.rank();
  const Span sent = session.call().sent(own, own);
  copy(kernel, rows_of(session.output(), session.call().received(own, own)), 0,
       rows_of(session.input(), sent), 0, sent.bytes());
}

}  // namespace collx::cpu
