// How a failed rank tells its own host and its peers, and how a rank learns that one has failed.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// True when a rank of the communicator has failed; its report is then visible.
bool poisoned(const RankView& view);

/// Copies the report of the rank that failed first into this rank's status, unless a report is
/// there already. Only after poisoned().
void adopt(const RankView& view);

}  // namespace collx::cpu
