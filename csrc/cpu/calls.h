// The collectives between processes (or threads) on one machine over shared memory. This header
// does not depend on Torch.
#pragma once

#include "../protocol/call.h"
#include "../protocol/cpu_layout.h"

namespace collx::cpu {

/// Makes a zeroed region of this rank ready for use. Peers may use it after a barrier.
void initialize(char* region, const CpuLayout& layout);

/// Execute a call. They return false if the communicator has failed. Then view.status has the
/// reason.
bool allreduce(const CpuView& view, const AllreduceCall& call);
bool exchange(const CpuView& view, const ExchangeCall& call);
bool norm(const CpuView& view, const NormCall& call);

/// Returns when all ranks have arrived.
bool barrier(const CpuView& view, const CallDescriptor& descriptor);

/// Reduces `inputs[0..world)` in rank order into `output`. Every algorithm uses this arithmetic,
/// and the fallback needs nothing else.
void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op);

/// Sums `inputs[0..world)`, each [call.rows, call.cols], in rank order and writes the results of
/// all call.rows rows. Every algorithm uses this arithmetic, and the fallback needs nothing else.
void normalize(const void* const* inputs, int world, const NormCall& call);

}  // namespace collx::cpu
