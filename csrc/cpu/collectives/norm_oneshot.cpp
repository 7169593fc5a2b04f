// Every rank gets all inputs, and sums and normalizes all rows. If a chunk ends within a row, the
// next chunk completes the row. The traffic is as in allreduce_oneshot.cpp.
#include "norm_steps.h"
#include "oneshot.h"

namespace collx::cpu {
namespace {

auto normalizing(NormSession& session, NormRows& rows) {
  return [&](Operands& operands, uint64_t at, uint64_t bytes) {
    const uint64_t element = element_bytes(session);
    rows.take(operands.sources, session.world(), at / element, bytes / element);
  };
}

}  // namespace

bool norm_oneshot_push(NormSession& session, CopyKernel copy, NormRows& rows) {
  return push_to_all(session, copy, input_bytes(session), normalizing(session, rows));
}

bool norm_oneshot_pull(NormSession& session, CopyKernel copy, NormRows& rows) {
  return pull_from_all(session, copy, input_bytes(session), normalizing(session, rows));
}

}  // namespace collx::cpu
