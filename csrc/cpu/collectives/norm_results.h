// The message in which the owner of a row passes on its results: the scales, then the input of the
// norm, the normalized row and the quantized row, as far as they exist.
#pragma once

#include "../../protocol/call.h"
#include "../simd/reduce_kernels.h"

namespace collx::cpu {

class NormResults {
 public:
  NormResults(const NormCall& call, CopyKernel copy);

  uint64_t row_bytes() const { return row_bytes_; }
  /// Copies the bytes [from, from + bytes) of the concatenated messages of neighboring rows out of
  /// the results. `from` and the end are row boundaries or multiples of four.
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
