// Every collective but all-reduce between GPUs of one machine. Launchers only, as in device.h.
#pragma once

#include "device.h"

namespace collx::cuda {

/// Launches the call. Errors of the launch itself throw std::runtime_error.
void exchange(const CudaView& view, const ExchangeCall& call, Stream stream);

/// Launches a barrier of all ranks.
void barrier(const CudaView& view, const CallDescriptor& descriptor, Stream stream);

}  // namespace collx::cuda
