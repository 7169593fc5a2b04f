// What the owner of a row passes on: its scales, then what was normalized, the normalized row and
// the quantized one, whichever exist, as one message.
#pragma once

#include "../../protocol/call.h"
#include "../simd/reduce_kernels.h"

namespace collx::cpu {

class NormResults {
 public:
  NormResults(const NormCall& call, CopyKernel copy);

  uint64_t row_bytes() const { return row_bytes_; }
  /// Copies the bytes [from, from + bytes) of the messages of neighboring rows, which follow each
  /// other, out of the results. `from` and the end are borders of rows or multiples of four.
  void pack(char* to, uint64_t first_row, uint64_t from, uint64_t bytes) const;
  /// The same from a message into the results.
  void unpack(const char* from, uint64_t first_row, uint64_t at, uint64_t bytes) const;

 private:
  template <typename Move>
  void visit(uint64_t first_row, uint64_t from, uint64_t bytes, Move move) const;

  const NormCall& call_;
  CopyKernel copy_;
  uint64_t row_bytes_;
};

}  // namespace collx::cpu
