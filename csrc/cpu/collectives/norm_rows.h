// Assembles and finishes the rows of a call: the values of all ranks arrive in order, but in pieces
// of any length, and the results of a row are written when it is complete.
#pragma once

#include <vector>

#include "../../protocol/call.h"
#include "../row_epilogue.h"
#include "../simd/norm_kernels.h"

namespace collx::cpu {

class NormRows {
 public:
  /// `rows`: the rows of the residual and the results. May throw std::bad_alloc; the other
  /// functions do not.
  NormRows(const NormCall& call, uint64_t rows);

  /// Takes the values of each rank, starting at element `at` of the rows. Rows may come in any
  /// order, but the elements of each row must come in order from its first element, without gaps.
  /// Expects a FloatEnvironment.
  void take(const void* const* sources, int world, uint64_t at, uint64_t count);

 private:
  struct alignas(64) Line {
    float values[16];
  };
  class Array {
   public:
    explicit Array(uint64_t numel) : lines_(ceil_div<uint64_t>(numel, 16)) {}
    float* at(uint64_t index) { return lines_.empty() ? nullptr : lines_[0].values + index; }

   private:
    std::vector<Line> lines_;
  };

  void prepare();
  void widen(const void* weights, float* to, float offset) const;
  void sum(const void* const* sources, int world, uint64_t at, uint64_t count);
  void finish(uint64_t row);
  bool is_column(const Coordinate& c) const;
  void place_operands(uint64_t row, NormRow& task);

  const NormCall& call_;
  const NormKernels& kernels_;
  uint64_t rows_;
  uint64_t element_;
  bool prepared_ = false;
  Array sums_, tree_, gain_, bias_;
  // For an epilogue: a row that is not a result, the column indices, and the locations of the
  // operands for one row.
  std::vector<char> mapped_;
  std::vector<int64_t> columns_, coordinates_, strides_;
  std::vector<char*> operands_;
};

/// The scales of a row, as they are stored.
struct RowScales {
  char* first;     // null: none
  uint64_t count;  // groups, or one for the row
  uint64_t bytes;  // of each
  uint64_t stride;
};
RowScales scales_of(const NormCall& call, uint64_t rows, uint64_t row);

}  // namespace collx::cpu
