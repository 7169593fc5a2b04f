// What the Relacy tests share. Relacy is of 2019 and redefines operator names by macros, so it
// comes last among the headers.
#pragma once

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <relacy/relacy.hpp>

// What a test orders by, unless the mutants RELAXED_STORE and RELAXED_LOAD take it away.
#ifdef RELAXED_STORE
#define RELEASE rl::mo_relaxed
#else
#define RELEASE rl::mo_release
#endif
#ifdef RELAXED_LOAD
#define ACQUIRE rl::mo_relaxed
#else
#define ACQUIRE rl::mo_acquire
#endif

namespace model {

/// Runs the test on random schedules, each with random choices of what a weak load may return.
/// Exit status 1 when one of them fails.
template <typename Test>
int run(int schedules) {
  rl::test_params params;
  params.iteration_count = static_cast<rl::iteration_t>(schedules);
  params.execution_depth_limit = 20000;
  params.search_type = rl::random_scheduler_type;
  if (!rl::simulate<Test>(params)) return 1;
  std::cout << "schedules " << params.stop_iteration << std::endl;
  return 0;
}

/// bar.sync: a barrier of `N` threads that hands each thread's accesses to the others.
template <unsigned N>
class BlockBarrier {
 public:
  BlockBarrier() : arrived_(0) {}
  void sync() {
    const unsigned mine = arrived_($).fetch_add(1, rl::mo_acq_rel);
    const unsigned target = (mine / N + 1) * N;
    while (arrived_($).load(rl::mo_acquire) < target) rl::yield(1, $);
  }

 private:
  rl::atomic<unsigned> arrived_;
};

}  // namespace model
