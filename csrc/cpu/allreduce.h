// All-reduce between processes (or threads) of one machine over shared memory. No Torch here.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Carries the call out. Returns false when the communicator failed; view.status then holds why.
bool allreduce(const CpuView& view, const AllreduceCall& call);

/// Reduces `inputs[0..world)` in rank order into `output`: the arithmetic of every algorithm, and
/// all that the fallback needs.
void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op);

}  // namespace collx::cpu
