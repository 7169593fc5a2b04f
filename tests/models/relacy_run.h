// Helpers for the Relacy tests. Relacy dates from 2019 and redefines operator names with macros, so
// it is the last of the headers.
#pragma once

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <relacy/relacy.hpp>
#include <string>

namespace model {

/// The switches on the command line: mutants, and other forms of the test. They are not copied,
/// because Relacy frees memory that is allocated while it runs.
inline char** switches = nullptr;  // ends with a null pointer

inline bool named(const char* name) {
  for (char** given = switches; *given != nullptr; ++given) {
    if (std::strcmp(*given, name) == 0) return true;
  }
  return false;
}

}  // namespace model

// A switch at run time: one program contains a test and all its mutants.
#define SWITCH(name)                            \
  ([] {                                         \
    static const bool on = model::named(#name); \
    return on;                                  \
  }())
// The memory orders of a test. The mutants RELAXED_STORE and RELAXED_LOAD relax them.
#define RELEASE (SWITCH(RELAXED_STORE) ? rl::mo_relaxed : rl::mo_release)
#define ACQUIRE (SWITCH(RELAXED_LOAD) ? rl::mo_relaxed : rl::mo_acquire)

namespace model {

/// Runs the test with the switches on the command line, on random schedules with random results of
/// weak loads. Returns exit status 1 if one of them fails.
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

/// Models bar.sync: a barrier of `N` threads that orders each thread's accesses for the others.
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
