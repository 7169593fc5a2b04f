// The exchange through sentinel slots, in the C++ memory model: words are relaxed atomics that
// signal their own arrival, re-arms are relaxed too, and there is a fence between a re-arm and the
// next word that lets a peer continue. Each of two ranks has WORDS threads, one for each word of
// the tile. There are USES uses in one kernel, of which the last only covers the first word if
// PARTIAL is set, then a kernel boundary and one more use.
//
// This must hold in the memory model itself: a re-arm happens before the peer's next store to the
// word. `rearmed` makes a violation visible: the reader writes a plain variable before it re-arms,
// and the sender reads the variable before it stores. If the two are not ordered, this is a data
// race.
//
// Mutants: NO_FENCE, NO_BLOCK_BARRIER, NO_REARM, SLOTS=1.
#include "relacy_run.h"

#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef WORDS
#define WORDS 1
#endif
#ifndef USES
#define USES 3
#endif

namespace {

constexpr unsigned kArmed = ~0u;

struct Sentinel : rl::test_suite<Sentinel, 2 * WORDS> {
  rl::atomic<unsigned> slot[2][SLOTS][WORDS];  // of each rank, filled by the other rank
  rl::var<int> rearmed[2][WORDS][USES + 2];
  model::BlockBarrier<WORDS> block[2];

  void before() {
    for (auto& rank : slot) {
      for (auto& parity : rank) {
        for (auto& word : parity) word($) = kArmed;
      }
    }
    for (auto& rank : rearmed) {
      for (auto& word : rank) {
        for (auto& use : word) use($) = 0;
      }
    }
  }

  static unsigned value(unsigned rank, unsigned word, unsigned use) {
    return 100 * rank + 10 * word + use;
  }

  void push(unsigned me, unsigned word, unsigned use) {
    const unsigned peer = 1 - me;
    // The peer's re-arm in the previous use of this slot.
    if (use >= SLOTS && covers(word, use - SLOTS)) {
      RL_ASSERT(rearmed[peer][word][use - SLOTS]($) == 1);
    }
    slot[peer][use % SLOTS][word]($).store(value(me, word, use), rl::mo_relaxed);
  }

  void take(unsigned me, unsigned word, unsigned use) {
    auto& mine = slot[me][use % SLOTS][word];
    unsigned seen;
    while ((seen = mine($).load(rl::mo_relaxed)) == kArmed) rl::yield(1, $);
    RL_ASSERT(seen == value(1 - me, word, use));
    rearmed[me][word][use]($) = 1;
    if (!SWITCH(NO_REARM)) mine($).store(kArmed, rl::mo_relaxed);
  }

  static bool covers(unsigned word, unsigned use) {
    return !SWITCH(PARTIAL) || word == 0 || use != USES - 1;
  }

  void thread(unsigned index) {
    const unsigned me = index / WORDS, word = index % WORDS;
    for (unsigned use = 0; use < USES; ++use) {
      if (use > 0) {
        if (WORDS > 1 && !SWITCH(NO_BLOCK_BARRIER)) block[me].sync();
        if (!SWITCH(NO_FENCE)) rl::atomic_thread_fence(rl::mo_acq_rel, $);
      }
      if (!covers(word, use)) continue;
      push(me, word, use);
      take(me, word, use);
    }
    // The end of the kernel, and the start of the next one, which uses the whole tile.
    rl::atomic_thread_fence(rl::mo_acq_rel, $);
    if (WORDS > 1) block[me].sync();
    rl::atomic_thread_fence(rl::mo_acq_rel, $);
    push(me, word, USES);
    take(me, word, USES);
  }
};

}  // namespace

int main(int, char** arguments) { return model::run<Sentinel>(SCHEDULES, arguments); }
