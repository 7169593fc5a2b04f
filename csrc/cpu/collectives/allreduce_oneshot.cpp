// Every rank gets all inputs and reduces them: pushed into its slots, or pulled from where they lie
// when they are symmetric and not small, otherwise from where their owners staged them.
// Traffic of a rank: push: (W-1)·n written, W·n read; pull: n written to the staging (symmetric:
// nothing), W·n read. One exchange a chunk (symmetric: two a call).
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
