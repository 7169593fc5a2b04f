// Reductions fused with normalisations between processes (or threads) of one machine. No Torch here.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Carries the call out. Returns false when the communicator failed; view.status then holds why.
bool norm(const RankView& view, const NormCall& call);

/// Reduces `inputs[0..world)` in rank order, each [call.rows, call.cols], and normalises the rows:
/// all that the fallback and a single rank need.
void normalise(const void* const* inputs, int world, const NormCall& call);

}  // namespace collx::cpu
