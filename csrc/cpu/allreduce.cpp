#include "allreduce.h"

#include <stdexcept>
#include <string>

#include "../protocol/names.h"
#include "collectives/collectives.h"
#include "simd/float_environment.h"

namespace collx::cpu {
namespace {

using Steps = bool (*)(AllreduceSession&, const CallKernels&);

Steps algorithm_of(const AllreduceCall& call) {
  switch (call.plan.algorithm) {
    case Algorithm::oneshot_push:
      return allreduce_oneshot_push;
    case Algorithm::twoshot_push:
      return allreduce_twoshot_push;
    case Algorithm::pull_push:
      return allreduce_pull_push;
    case Algorithm::oneshot_pull:
      return allreduce_oneshot_pull;
    case Algorithm::twoshot_pull:
      return allreduce_twoshot_pull;
    default:
      throw std::invalid_argument("algorithm " + std::string(name_of(call.plan.algorithm)) +
                                  " has no CPU kernel");
  }
}

bool keep(AllreduceSession& session, const CallKernels& kernels) {
  const AllreduceCall& call = session.call();
  const uint64_t bytes = call.numel * session.element();
  if (call.output != call.input) kernels.copy(call.output, call.input, bytes);
  return true;
}

}  // namespace

bool allreduce(const RankView& view, const AllreduceCall& call) {
  const CallKernels kernels{reduce_kernel(call.dtype, call.reduce_op), copy_kernel()};
  const Steps algorithm = view.world == 1 ? keep : algorithm_of(call);
  AllreduceSession session(view, call);
  if (!session.enter()) return false;
  if (view.check && !session.meet(Phase::check)) return false;
  const FloatEnvironment environment;
  // Equal shapes: empty on one rank is empty on all, and nothing is exchanged.
  if (call.numel != 0 && !algorithm(session, kernels)) return false;
  session.complete();
  return true;
}

void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op) {
  const ReduceKernel kernel = reduce_kernel(dtype, op);
  const FloatEnvironment environment;
  if (numel != 0) kernel({inputs, world, &output, 1, numel});
}

}  // namespace collx::cpu
