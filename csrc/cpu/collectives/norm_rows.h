// The rows of one call as they become complete: values come in from all ranks, in order but in
// pieces of any length; results go out when a row is whole.
#pragma once

#include <vector>

#include "../../protocol/call.h"
#include "../row_epilogue.h"
#include "../simd/norm_kernels.h"

namespace collx::cpu {

class NormRows {
 public:
  /// `rows`: of the residual and the results. May throw std::bad_alloc; nothing below does.
  NormRows(const NormCall& call, uint64_t rows);

  /// The values of each rank from element `at` of the rows. Rows are given in any order, each from
  /// its first element on without a gap. Expects a FloatEnvironment.
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
  // Of an epilogue: a row that is no result, columns, and where its operands lie for one row.
  std::vector<char> mapped_;
  std::vector<int64_t> columns_, coordinates_, strides_;
  std::vector<char*> operands_;
};

/// Scales of a row as they are stored.
struct RowScales {
  char* first;     // null: none
  uint64_t count;  // groups, or one of the row
  uint64_t bytes;  // of each
  uint64_t stride;
};
RowScales scales_of(const NormCall& call, uint64_t rows, uint64_t row);

}  // namespace collx::cpu
