// The algorithms, in one file each. All are collective: every rank runs the same one.
#pragma once

#include "../session.h"
#include "../simd/reduce_kernels.h"

namespace collx::cpu {

/// The kernels with which a call computes and copies.
struct CallKernels {
  ReduceKernel reduce;  // null if nothing is reduced
  CopyKernel copy;
};

using AllreduceSession = SessionOf<AllreduceCall>;

bool allreduce_oneshot_push(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_twoshot_push(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_pull_push(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_oneshot_pull(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_twoshot_pull(AllreduceSession& session, const CallKernels& kernels);

class ExchangeSession : public SessionOf<ExchangeCall> {
 public:
  using SessionOf::SessionOf;
  bool is_root() const { return call().root == rank(); }
  /// Whether this rank reduces the messages that it receives: in a reduce to a root, only the root
  /// does.
  bool reduces() const { return is_reduction(call().collective) && (call().root < 0 || is_root()); }
};

bool gather_scatter_staged(ExchangeSession& session, const CallKernels& kernels);
bool gather_scatter_direct(ExchangeSession& session, const CallKernels& kernels);
bool alltoallv_staged(ExchangeSession& session, const CallKernels& kernels);
bool alltoallv_direct(ExchangeSession& session, const CallKernels& kernels);
bool broadcast_direct(ExchangeSession& session, const CallKernels& kernels);
bool broadcast_twostage(ExchangeSession& session, const CallKernels& kernels);
bool broadcast_pipelined(ExchangeSession& session, const CallKernels& kernels);

}  // namespace collx::cpu
