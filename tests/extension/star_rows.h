// The table rows of a new algorithm in protocol/algorithms.h and cpu/allreduce.cpp. Builds with the
// algorithm include this file before every source.
#pragma once

namespace collx {
struct AllreduceCall;
}

namespace collx::cpu {

template <typename C>
class SessionOf;
struct CallKernels;

bool allreduce_star(SessionOf<AllreduceCall>& session, const CallKernels& kernels);

}  // namespace collx::cpu

#define COLLX_EXTRA_ALGORITHMS            \
  {.algorithm = Algorithm::count,         \
   .name = "star",                        \
   .serves = only(Collective::allreduce), \
   .share = Share::tensor,                \
   .staging = true,                       \
   .results = true},
#define COLLX_EXTRA_CPU_ALLREDUCE {Algorithm::count, kAllreduce, allreduce_star},
