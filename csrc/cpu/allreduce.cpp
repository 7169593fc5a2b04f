#include "calls.h"
#include "collectives/bodies.h"
#include "collectives/collectives.h"
#include "simd/float_environment.h"

namespace collx::cpu {
namespace {

using Steps = bool (*)(AllreduceSession&, const CallKernels&);

constexpr Body<Steps> kBodies[] = {{Algorithm::oneshot_push, kAllreduce, allreduce_oneshot_push},
                                   {Algorithm::twoshot_push, kAllreduce, allreduce_twoshot_push},
                                   {Algorithm::pull_push, kAllreduce, allreduce_pull_push},
                                   {Algorithm::oneshot_pull, kAllreduce, allreduce_oneshot_pull},
                                   {Algorithm::twoshot_pull, kAllreduce, allreduce_twoshot_pull},
#if defined(COLLX_EXTRA_CPU_ALLREDUCE)
                                   COLLX_EXTRA_CPU_ALLREDUCE
#endif
};
static_assert(are_complete(kBodies, kAllreduce));

bool keep(AllreduceSession& session, const CallKernels& kernels) {
  const AllreduceCall& call = session.call();
  const uint64_t bytes = call.numel * static_cast<uint64_t>(dtype_size(call.dtype));
  if (call.output != call.input) kernels.copy(call.output, call.input, bytes);
  return true;
}

}  // namespace

bool allreduce(const CpuView& view, const AllreduceCall& call) {
  const CallKernels kernels{reduce_kernel(call.dtype, call.reduce_op), copy_kernel()};
  const Steps algorithm =
      view.world == 1 ? keep : require_body(kBodies, Collective::allreduce, call.plan.algorithm);
  AllreduceSession session(view, call);
  if (!session.enter()) return false;
  if (view.check && !session.meet(Phase::check)) return false;
  const FloatEnvironment environment;
  // The shapes are equal: if the tensor is empty on one rank, it is empty on all, and the ranks
  // exchange nothing.
  if (call.numel != 0 && !algorithm(session, kernels)) return false;
  return session.complete();
}

void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op) {
  const ReduceKernel kernel = reduce_kernel(dtype, op);
  const FloatEnvironment environment;
  if (numel != 0) kernel({inputs, world, &output, 1, numel});
}

}  // namespace collx::cpu
