// Every collective but all-reduce, between processes (or threads) of one machine over shared
// memory. No Torch here.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// Carries the call out. Returns false when the communicator failed; view.status then holds why.
bool exchange(const CpuView& view, const ExchangeCall& call);

/// Returns when all ranks have come.
bool barrier(const CpuView& view, const CallDescriptor& descriptor);

}  // namespace collx::cpu
