// What the Relacy tests share. Relacy is of 2019 and redefines operator names by macros, so it
// comes last among the headers.
#pragma once

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <relacy/relacy.hpp>
#include <string>

namespace model {

/// The switches that the command line names: mutants, and other forms of the test. Relacy frees
/// what is allocated while it runs, so they are not copied.
inline char** switches = nullptr;  // up to a null pointer

inline bool named(const char* name) {
  for (char** given = switches; *given != nullptr; ++given) {
    if (std::strcmp(*given, name) == 0) return true;
  }
  return false;
}

}  // namespace model

// One program runs a test and all its mutants.
#define SWITCH(name)                            \
  ([] {                                         \
    static const bool on = model::named(#name); \
    return on;                                  \
  }())
// What a test orders by, unless the mutants RELAXED_STORE and RELAXED_LOAD take it away.
#define RELEASE (SWITCH(RELAXED_STORE) ? rl::mo_relaxed : rl::mo_release)
#define ACQUIRE (SWITCH(RELAXED_LOAD) ? rl::mo_relaxed : rl::mo_acquire)

namespace model {

/// Runs the test, with the switches that the command line names, on random schedules, each with
/// random choices of what a weak load may return. Exit status 1 when one of them fails.
template <typename Test>
int run(int schedules, char** arguments) {
  switches = arguments + 1;
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
