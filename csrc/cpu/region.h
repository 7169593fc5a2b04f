// A CPU rank's region: its size and its initialization.
#pragma once

#include "../protocol/cpu_layout.h"

namespace collx::cpu {

/// Region layout for CPU ranks, within `payload_bytes`.
CpuLayout layout(int world, uint64_t payload_bytes);

/// Makes a zeroed region of this rank ready for use. Peers may use it after a barrier.
void initialize(char* region, const CpuLayout& layout);

}  // namespace collx::cpu
