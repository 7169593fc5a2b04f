// Reductions fused with a normalization of their rows, between processes (or threads) on one
// machine over shared memory. This header does not depend on Torch.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Executes the call. Returns false if the communicator has failed. Then view.status has the
/// reason.
bool norm(const CpuView& view, const NormCall& call);

/// Sums `inputs[0..world)`, each [call.rows, call.cols], in rank order and writes the results of
/// all call.rows rows. Every algorithm uses this arithmetic, and the fallback needs nothing else.
void normalize(const void* const* inputs, int world, const NormCall& call);

}  // namespace collx::cpu
