// Reductions fused with a normalization: the algorithms, and what they have in common.
#pragma once

#include "norm_rows.h"
#include "steps.h"

namespace collx::cpu {

/// A fused normalization under way. Addresses by element.
class NormSession : public Session {
 public:
  NormSession(const RankView& view, const NormCall& call) : Session(view, call), call_(call) {}

  const NormCall& call() const { return call_; }
  uint64_t element() const { return static_cast<uint64_t>(dtype_size(call_.dtype)); }
  uint64_t numel() const { return call_.rows * call_.cols; }

  const char* input(uint64_t index) const {
    return static_cast<const char*>(call_.input) + index * element();
  }
  const char* peer_input(int of, uint64_t index) const {
    return static_cast<const char*>(call_.peer_input[of]) + index * element();
  }
  /// Whether peers read this call's inputs where they lie.
  bool inputs_symmetric() const { return call_.peer_input[rank()] != nullptr; }

 private:
  const NormCall& call_;
};

/// `rows` takes the values of this rank's rows and writes the results.
using NormSteps = bool (*)(NormSession& session, CopyKernel copy, NormRows& rows);

bool norm_oneshot_push(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_oneshot_pull(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_twoshot_push(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_twoshot_pull(NormSession& session, CopyKernel copy, NormRows& rows);
bool norm_staged(NormSession& session, CopyKernel copy, NormRows& rows);

}  // namespace collx::cpu
