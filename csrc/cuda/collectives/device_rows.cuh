// Messages of which the device alone knows the length.
#pragma once

#include "../stages/vectors.cuh"

namespace collx::cuda {

/// `rows` rows of a tensor from row `start` on.
__device__ __forceinline__ Message rows_of(const Message& tensor, uint64_t row_bytes,
                                           uint64_t start, uint64_t rows) {
  Message m = tensor;
  m.data += start * row_bytes;
  m.bytes = m.width = m.pitch = rows * row_bytes;
  m.whole = tensor.whole && start * row_bytes % kVectorBytes == 0;
  m.wire = wire_vectors(true, Run<>(m).vectors());
  return m;
}

/// Whether a message between two ranks takes more than one use of the channels.
__device__ __forceinline__ bool is_long(const Message& m, const KernelCall& call) {
  return m.wire > call.capacity;
}

}  // namespace collx::cuda
