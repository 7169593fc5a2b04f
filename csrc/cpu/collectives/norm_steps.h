// Reductions fused with a normalization: the algorithms and their common parts.
#pragma once

#include "norm_rows.h"
#include "steps.h"

namespace collx::cpu {

using NormSession = SessionOf<NormCall>;

inline uint64_t input_bytes(const NormSession& session) {
  return session.call().rows * session.call().cols * element_bytes(session);
}

/// `rows` takes the values of this rank's rows and writes the results.
using NormSteps = bool (*)(NormSession& session, CopyKernel copy, NormRows& rows);

bool norm_oneshot_push(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_oneshot_pull(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_twoshot_push(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_twoshot_pull(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_staged(NormSession& session, CopyKernel copy, NormRows& rows);

}  // namespace collx::cpu
