// All-reduce between GPUs of one machine. This header declares launchers only, like device.h.
#pragma once

#include "device.h"

namespace collx::cuda {

/// Launches the call. Errors of the launch itself throw std::runtime_error.
void allreduce(const CudaView& view, const AllreduceCall& call, Stream stream);

/// Reduces `inputs[0..world)` in rank order into `output`. The fallback needs only this.
void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op, Stream stream);

}  // namespace collx::cuda
