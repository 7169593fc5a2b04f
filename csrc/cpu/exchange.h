// Every collective except all-reduce, between processes (or threads) on one machine over shared
// memory. This header does not depend on Torch.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Executes the call. Returns false if the communicator has failed. Then view.status has the
/// reason.
bool exchange(const CpuView& view, const ExchangeCall& call);

/// Returns when all ranks have arrived.
bool barrier(const CpuView& view, const CallDescriptor& descriptor);

}  // namespace collx::cpu
