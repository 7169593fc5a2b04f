// The algorithms, one file each. All are collective: every rank takes the same one.
#pragma once

#include "../session.h"
#include "../simd/reduce_kernels.h"

namespace collx::cpu {

/// What a call computes and copies with.
struct CallKernels {
  ReduceKernel reduce;
  CopyKernel copy;
};

bool allreduce_oneshot_push(Session& session, const CallKernels& kernels);
bool allreduce_twoshot_push(Session& session, const CallKernels& kernels);
bool allreduce_pull_push(Session& session, const CallKernels& kernels);
bool allreduce_oneshot_pull(Session& session, const CallKernels& kernels);
bool allreduce_twoshot_pull(Session& session, const CallKernels& kernels);

}  // namespace collx::cpu
