// What a new algorithm adds to the tables: a row of protocol/algorithms.h, and one of
// cpu/allreduce.cpp. Included before every source of the build that has it.
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
