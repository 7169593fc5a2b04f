// How a failed rank tells its own host and its peers, and how a rank learns that one has failed.
#pragma once

#include "../protocol/call.h"

namespace collx::cpu {

/// True when a rank of the communicator has failed; its report is then visible.
bool poisoned(const RankView& view);

/// Whom a rank should name that has waited for `peer` in vain: that may be waiting itself, for a
/// rank that never comes. Ends early when somebody else reports.
int missing_rank(const RankView& view, int peer);

/// Copies the report of the rank that failed first into this rank's status, unless a report is
/// there already. Only after poisoned().
void adopt(const RankView& view);

}  // namespace collx::cpu
