// How a failed rank reports to its own host and its peers, and how a rank detects a failed one.
// Who is named: protocol/blame.h.
#pragma once

#include "../protocol/call.h"
#include "../protocol/progress.h"

namespace collx::cpu {

/// Leaves a note of this rank's failure at every rank, marks them unless another rank has, and
/// records the result of all notes. The first report on a rank wins.
void report(const CpuView& view, const StatusRecord& record);

/// True when a rank of the communicator has failed; its note is then visible.
bool poisoned(const CpuView& view);

/// Copies the failure in the notes of the others to this rank's status, unless that contains
/// something already: for a rank that comes when others have failed. Only after poisoned().
void adopt(const CpuView& view);

/// How far a rank has come. By any thread of any rank.
Progress progress_of(const CpuView& view, int rank);

}  // namespace collx::cpu
