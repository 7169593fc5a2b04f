// The collectives between GPUs of one machine. This header declares launchers only, like device.h.
#pragma once

#include "copy_streams.h"
#include "device.h"

namespace collx::cuda {

/// Launch a call. Errors of the launch itself throw std::runtime_error.
void allreduce(const CudaView& view, const AllreduceCall& call, Stream stream);
void exchange(const CudaView& view, const ExchangeCall& call, Stream stream);
void norm(const CudaView& view, const NormCall& call, Stream stream);

/// Enqueues the copies of a call with Algorithm::copy_engine. They run between two barriers.
void copy(const CudaView& view, const ExchangeCall& call, CopyStreams& streams, Stream stream);

/// Launches the barrier before the copies. The barrier after them counts the call.
void enter(const CudaView& view, const CallDescriptor& descriptor, CopyStreams& streams,
           Stream stream);

/// Launches a barrier of all ranks.
void barrier(const CudaView& view, const CallDescriptor& descriptor, Stream stream);

/// Reduces `inputs[0..world)` in rank order into `output`. The fallback needs only this.
void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op, Stream stream);

/// Reduces `inputs[0..world)` in rank order, each [call.rows, call.cols], and normalizes the rows.
/// The fallback and a single rank need only this.
void normalize(const void* const* inputs, int world, const NormCall& call, Stream stream);

}  // namespace collx::cuda
