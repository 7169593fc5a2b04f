// The algorithms, one file each. All are collective: every rank takes the same one.
#pragma once

#include "../session.h"
#include "../simd/reduce_kernels.h"

namespace collx::cpu {

bool allreduce_oneshot_push(Session& session, ReduceKernel reduce);
bool allreduce_twoshot_push(Session& session, ReduceKernel reduce);
bool allreduce_pull_push(Session& session, ReduceKernel reduce);
bool allreduce_oneshot_pull(Session& session, ReduceKernel reduce);
bool allreduce_twoshot_pull(Session& session, ReduceKernel reduce);

}  // namespace collx::cpu
