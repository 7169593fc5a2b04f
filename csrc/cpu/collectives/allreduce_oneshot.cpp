// Every rank gets all inputs and reduces them. Inputs are pushed into its slots, pulled directly if
// they are symmetric and not small, or pulled from their owners' staging memory.
// Traffic of a rank: push: (W-1)·n written, W·n read; pull: n written to the staging memory
// (symmetric: nothing), W·n read. One exchange for each chunk (symmetric: two for each call).
#include "oneshot.h"

namespace collx::cpu {
namespace {

auto reducing(AllreduceSession& session, const CallKernels& kernels) {
  return [&](Operands& operands, uint64_t at, uint64_t bytes) {
    operands.add_target(session.output(at));
    reduce(kernels, session, operands, bytes / element_bytes(session));
  };
}

}  // namespace

bool allreduce_oneshot_push(AllreduceSession& session, const CallKernels& kernels) {
  return push_to_all(session, kernels.copy, input_bytes(session), reducing(session, kernels));
}

bool allreduce_oneshot_pull(AllreduceSession& session, const CallKernels& kernels) {
  return pull_from_all(session, kernels.copy, input_bytes(session), reducing(session, kernels));
}

}  // namespace collx::cpu
