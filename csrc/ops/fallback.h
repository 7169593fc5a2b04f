// Collectives through the process group, for ranks that cannot access each other's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "../protocol/call.h"

namespace collx {

class Communicator;

/// The maximum number of bytes that a fallback call gathers at once from all ranks together.
inline constexpr uint64_t kFallbackGatherBytes = 64ull << 20;

/// Bytes of one rank's tensor that one gather takes.
constexpr uint64_t fallback_chunk_bytes(int world, DType dtype) {
  const auto element = static_cast<uint64_t>(dtype_size(dtype));
  return kFallbackGatherBytes / static_cast<uint64_t>(world) / element * element;
}

/// Gathers one chunk after the other from all ranks and reduces each in rank order, with the same
/// bits as all other algorithms. Returns when the result is complete or, on CUDA, enqueued. The
/// caller must hold the communicator's lock, and its device must be the current one.
void fallback_allreduce(Communicator& communicator, const char* op, const AllreduceCall& call,
                        const at::Tensor& input, const at::Tensor& output);

/// Gathers the messages of all ranks to all ranks, and extracts those for this rank.
void fallback_exchange(Communicator& communicator, const char* op, const ExchangeCall& call,
                       const at::Tensor& input, const at::Tensor& output);

/// Gathers, reduces and normalizes the rows, one chunk after the other: fallback_norm.cpp.
void fallback_norm(Communicator& communicator, const char* op, const NormCall& call,
                   const at::Tensor& input);

/// Reduces the `inputs` of `world` ranks in rank order and normalizes the rows, without peers. Each
/// input is [call.rows, call.cols] on the device of `like`.
void normalize_locally(const void* const* inputs, int world, const NormCall& call,
                       const at::Tensor& like);

/// Returns when all ranks have arrived.
void fallback_barrier(Communicator& communicator, const char* op, const CallDescriptor& descriptor);

}  // namespace collx
