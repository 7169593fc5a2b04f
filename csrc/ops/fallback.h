// The collectives through the process group, for ranks that cannot reach each other's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "../protocol/call.h"

namespace collx {

class Communicator;

/// Most bytes that a fallback call gathers at once, of all ranks together.
inline constexpr uint64_t kFallbackGatherBytes = 64ull << 20;

/// Bytes of one rank's tensor that one gather takes.
constexpr uint64_t fallback_chunk_bytes(int world, DType dtype) {
  const auto element = static_cast<uint64_t>(dtype_size(dtype));
  return kFallbackGatherBytes / static_cast<uint64_t>(world) / element * element;
}

/// Gathers chunk after chunk from all ranks and reduces each in rank order: the same bits as every
/// other algorithm. Returns when the result is there or, on CUDA, enqueued. The caller holds the
/// communicator's lock, and has the device current.
void fallback_allreduce(Communicator& communicator, const char* op, const AllreduceCall& call,
                        const at::Tensor& input, const at::Tensor& output);

/// Gathers what every rank sends to all ranks, and extracts the messages for this rank.
void fallback_exchange(Communicator& communicator, const char* op, const ExchangeCall& call,
                       const at::Tensor& input, const at::Tensor& output);

/// Gathers the rows, chunk after chunk, and reduces and normalizes them: fallback_norm.cpp.
void fallback_norm(Communicator& communicator, const char* op, const NormCall& call,
                   const at::Tensor& input);

/// Reduces `inputs` of `world` ranks in rank order, each [call.rows, call.cols] on the device of
/// `like`, and normalizes the rows: without peers.
void normalize_locally(const void* const* inputs, int world, const NormCall& call,
                       const at::Tensor& like);

/// Returns when all ranks have come.
void fallback_barrier(Communicator& communicator, const char* op, const CallDescriptor& descriptor);

}  // namespace collx
