// The channels of the CPU backend, in the C++ memory model: plain data in two alternating slots,
// published by words that count uses (store with release, load with acquire). W ranks run the
// two-shot pipeline, in which the next chunk is scattered before the last one is gathered. A data
// race on a slot is an error: it would be overwritten while a peer reads it.
//
// ONESHOT: the one-shot form, with one exchange per chunk.
// Mutants: RELAXED_STORE, RELAXED_LOAD, SLOTS=1, SCATTER_EARLY (one more chunk ahead).
#include "relacy_run.h"

#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef W
#define W 2
#endif

namespace {

constexpr unsigned kUses = 4;

struct Channel : rl::test_suite<Channel, W> {
  rl::var<unsigned> scattered[W][SLOTS][W];  // [owner][slot][sender]
  rl::var<unsigned> gathered[W][SLOTS][W];
  rl::atomic<unsigned> arrived[W], reduced[W];

  void before() {
    for (auto& a : arrived) a($) = 0;
    for (auto& r : reduced) r($) = 0;
  }

  static unsigned value(unsigned rank, unsigned use) { return 10 * use + rank; }

  void await(unsigned me, rl::atomic<unsigned> (&words)[W], unsigned use) {
    for (unsigned step = 1; step < W; ++step) {
      auto& word = words[(me + step) % W];
      while (static_cast<int>(word($).load(ACQUIRE) - use) < 0) rl::yield(1, $);
    }
  }

  void fill(rl::var<unsigned> (&slots)[W][SLOTS][W], unsigned me, unsigned use) {
    for (unsigned step = 1; step < W; ++step) {
      slots[(me + step) % W][use % SLOTS][me]($) = value(me, use);
    }
  }

  void read(rl::var<unsigned> (&slots)[W][SLOTS][W], unsigned me, unsigned use) {
    for (unsigned step = 1; step < W; ++step) {
      const unsigned peer = (me + step) % W;
      RL_ASSERT(slots[me][use % SLOTS][peer]($) == value(peer, use));
    }
  }

  void scatter(unsigned me, unsigned use) {
    fill(scattered, me, use);
    arrived[me]($).store(use, RELEASE);
  }

  void thread(unsigned me) {
    if (SWITCH(ONESHOT)) {
      oneshot(me);
    } else {
      twoshot(me);
    }
  }

  void oneshot(unsigned me) {
    for (unsigned use = 1; use <= kUses; ++use) {
      scatter(me, use);
      await(me, arrived, use);
      read(scattered, me, use);
    }
  }

  void twoshot(unsigned me) {
    const unsigned ahead = SWITCH(SCATTER_EARLY) ? 2 : 1;
    for (unsigned use = 1; use <= ahead; ++use) scatter(me, use);
    for (unsigned use = 1; use <= kUses; ++use) {
      await(me, arrived, use);
      read(scattered, me, use);
      fill(gathered, me, use);
      reduced[me]($).store(use, RELEASE);
      if (use + ahead <= kUses) scatter(me, use + ahead);
      await(me, reduced, use);
      read(gathered, me, use);
    }
  }
};

}  // namespace

int main(int, char** arguments) { return model::run<Channel>(SCHEDULES, arguments); }
