// Messages whose length only the device knows.
#pragma once

#include "../arguments/vectors.cuh"

namespace collx::cuda {

/// Whether a message between two ranks goes through lanes in a second kernel. `wire`: its number of
/// vectors, for channels of that capacity. The launch costs as much as a few uses of the channels.
COLLX_HD constexpr bool is_long(uint64_t wire, uint64_t capacity) { return wire > 3 * capacity; }

/// `rows` rows of a tensor, starting at row `start`.
__device__ __forceinline__ Message rows_of(const Message& tensor, uint64_t row_bytes,
                                           uint64_t start, uint64_t rows) {
  Message m = tensor;
  m.data += start * row_bytes;
  m.bytes = rows * row_bytes;
  m.gap = 0;  // it already is, but with a constant the compiler omits the code for runs
  m.whole = tensor.whole && start * row_bytes % kVectorBytes == 0;
  m.wire = wire_vectors(true, Run<>(m).vectors());
  return m;
}

}  // namespace collx::cuda
