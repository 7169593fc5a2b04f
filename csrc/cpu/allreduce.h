// All-reduce between processes (or threads) of one machine over shared memory. No Torch here.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Region layout for CPU ranks, within `payload_bytes`.
RegionLayout layout(int world, uint64_t payload_bytes);

/// Makes a zeroed region of this rank ready for use. Peers may use it after a barrier.
void initialize(char* region, const RegionLayout& layout);

/// Carries the call out. Returns false when the communicator failed; view.status then holds why.
bool allreduce(const RankView& view, const AllreduceCall& call);

/// Reduces `inputs[0..world)` in rank order into `output`: the arithmetic of every algorithm, and
/// all that the fallback needs.
void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op);

/// Leaves a note of this rank's failure at every rank, marks them unless another rank has, and
/// records what the notes of all come to. The first report on a rank wins.
void report(const RankView& view, const StatusRecord& record);

}  // namespace collx::cpu
