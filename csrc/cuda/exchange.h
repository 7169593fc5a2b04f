// Every collective except all-reduce between GPUs of one machine. This header declares launchers
// only, like device.h.
#pragma once

#include "copy_streams.h"
#include "device.h"

namespace collx::cuda {

/// Launches the call. Errors of the launch itself throw std::runtime_error.
void exchange(const CudaView& view, const ExchangeCall& call, Stream stream);

/// Enqueues the copies of a call with Algorithm::copy_engine. They run between two barriers.
void copy(const CudaView& view, const ExchangeCall& call, CopyStreams& streams, Stream stream);

/// Launches the barrier before the copies. The barrier after them counts the call.
void enter(const CudaView& view, const CallDescriptor& descriptor, CopyStreams& streams,
           Stream stream);

/// Launches a barrier of all ranks.
void barrier(const CudaView& view, const CallDescriptor& descriptor, Stream stream);

}  // namespace collx::cuda
