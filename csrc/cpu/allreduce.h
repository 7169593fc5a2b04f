// All-reduce between processes (or threads) on one machine over shared memory. This header does not
// depend on Torch.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Executes the call. Returns false if the communicator has failed. Then view.status has the
/// reason.
bool allreduce(const CpuView& view, const AllreduceCall& call);

/// Reduces `inputs[0..world)` in rank order into `output`. Every algorithm uses this arithmetic,
/// and the fallback needs nothing else.
void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op);

}  // namespace collx::cpu
