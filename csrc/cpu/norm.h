// Reductions fused with a normalization of their rows, between processes (or threads) of one
// machine over shared memory. No Torch here.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Carries the call out. Returns false when the communicator failed; view.status then holds why.
bool norm(const CpuView& view, const NormCall& call);

/// Sums `inputs[0..world)`, each [call.rows, call.cols], in rank order and writes the results of
/// all call.rows rows: the arithmetic of every algorithm, and all that the fallback needs.
void normalize(const void* const* inputs, int world, const NormCall& call);

}  // namespace collx::cpu
