// The algorithms, one file each. All are collective: every rank takes the same one.
#pragma once

#include "../session.h"
#include "../simd/reduce_kernels.h"

namespace collx::cpu {

/// What a call computes and copies with.
struct CallKernels {
  ReduceKernel reduce;  // null where nothing is reduced
  CopyKernel copy;
};

/// An all-reduce under way. Addresses by element.
class AllreduceSession : public Session {
 public:
  AllreduceSession(const RankView& view, const AllreduceCall& call)
      : Session(view, call), call_(call) {}

  const AllreduceCall& call() const { return call_; }
  uint64_t element() const { return static_cast<uint64_t>(dtype_size(call_.dtype)); }

  const char* input(uint64_t index) const {
    return static_cast<const char*>(call_.input) + index * element();
  }
  char* output(uint64_t index) const {
    return static_cast<char*>(call_.output) + index * element();
  }
  const char* peer_input(int of, uint64_t index) const {
    return static_cast<const char*>(call_.peer_input[of]) + index * element();
  }
  char* peer_output(int of, uint64_t index) const {
    return static_cast<char*>(call_.peer_output[of]) + index * element();
  }
  /// Whether peers read this call's inputs where they lie.
  bool inputs_symmetric() const { return call_.peer_input[rank()] != nullptr; }

 private:
  const AllreduceCall& call_;
};

bool allreduce_oneshot_push(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_twoshot_push(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_pull_push(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_oneshot_pull(AllreduceSession& session, const CallKernels& kernels);
bool allreduce_twoshot_pull(AllreduceSession& session, const CallKernels& kernels);

/// Any other collective under way. Addresses by byte.
class ExchangeSession : public Session {
 public:
  ExchangeSession(const RankView& view, const ExchangeCall& call)
      : Session(view, call), call_(call) {}

  const ExchangeCall& call() const { return call_; }
  bool is_root() const { return call_.root == rank(); }
  /// Whether this rank reduces what it receives: in a reduce to a root, the root alone.
  bool reduces() const {
    return is_reduction(call_.collective) && (call_.root < 0 || call_.root == rank());
  }

  const char* input() const { return static_cast<const char*>(call_.input); }
  char* output() const { return static_cast<char*>(call_.output); }
  const char* peer_input(int of) const { return static_cast<const char*>(call_.peer_input[of]); }
  char* peer_output(int of) const { return static_cast<char*>(call_.peer_output[of]); }
  bool outputs_symmetric() const { return call_.peer_output[rank()] != nullptr; }

 private:
  const ExchangeCall& call_;
};

bool exchange_staged(ExchangeSession& session, const CallKernels& kernels);
bool exchange_direct(ExchangeSession& session, const CallKernels& kernels);
bool alltoallv_staged(ExchangeSession& session, const CallKernels& kernels);
bool broadcast_onestage(ExchangeSession& session, const CallKernels& kernels);
bool broadcast_twostage(ExchangeSession& session, const CallKernels& kernels);
bool broadcast_pipelined(ExchangeSession& session, const CallKernels& kernels);

}  // namespace collx::cpu
