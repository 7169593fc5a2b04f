// Reductions fused with normalizations between GPUs of one machine. This header declares launchers
// only, like device.h.
#pragma once

#include "device.h"

namespace collx::cuda {

/// Launches the call. Errors of the launch itself throw std::runtime_error.
void norm(const CudaView& view, const NormCall& call, Stream stream);

/// Reduces `inputs[0..world)` in rank order, each [call.rows, call.cols], and normalizes the rows.
/// The fallback and a single rank need only this.
void normalize(const void* const* inputs, int world, const NormCall& call, Stream stream);

}  // namespace collx::cuda
