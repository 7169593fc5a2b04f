// How a failed rank reports to its host and its peers, and how a rank detects a failed one.
// protocol/blame.h determines which rank is named.
#pragma once

#include "../protocol/call.h"
#include "../protocol/progress.h"

namespace collx::cpu {

/// Leaves a note of this rank's failure at every rank, marks them unless another rank has done so,
/// and records the result of all notes. The first report on a rank wins.
void report(const CpuView& view, const StatusRecord& record);

/// True when a rank of the communicator has failed; its note is then visible.
bool poisoned(const CpuView& view);

/// Copies the failure in the other ranks' notes to this rank's status, unless the status already
/// has a failure. It is for a rank that arrives after others have failed. Call it only after
/// poisoned() has returned true.
void adopt(const CpuView& view);

/// The progress of a rank. Any thread of any rank may call it.
Progress progress_of(const CpuView& view, int rank);

}  // namespace collx::cpu
