// A channel from one rank to another, in the C++ memory model: two slots of words that signal their
// own arrival, and a done word. Each rank has two threads with one word each. Words and re-arms are
// relaxed. Done words are stored with release after the receiver's block barrier, and each thread
// of the sender loads them with acquire before it stores. All uses are in one kernel. In some of
// them, thread 1 has no word.
//
// This must hold in the memory model itself: a re-arm happens before the sender's next store to the
// word. `rearmed` makes a violation visible: the reader writes a plain variable before it re-arms,
// and the sender reads the variable before it stores. If the two are not ordered, this is a data
// race.
//
// Mutants: RELAXED_STORE, RELAXED_LOAD (of the done word), NO_BLOCK_BARRIER, DONE_EARLY (before the
// re-arms).
#include "relacy_run.h"

namespace {

constexpr unsigned kArmed = ~0u;
constexpr unsigned kUses = 5;
constexpr unsigned kFirstEpoch = 0xFFFFFFFEu;  // epochs wrap around

struct Oneway : rl::test_suite<Oneway, 4> {
  rl::atomic<unsigned> slot[2][2];  // at the receiver
  rl::atomic<unsigned> done;        // at the sender
  rl::var<int> rearmed[2][kUses];
  model::BlockBarrier<2> block;

  void before() {
    for (auto& parity : slot) {
      for (auto& word : parity) word($) = kArmed;
    }
    for (auto& word : rearmed) {
      for (auto& use : word) use($) = 0;
    }
    done($) = kFirstEpoch;
  }

  static bool covers(unsigned word, unsigned use) { return word == 0 || use % 3 != 1; }
  static unsigned value(unsigned word, unsigned use) { return 10 * use + word; }

  void send(unsigned word) {
    for (unsigned use = 0; use < kUses; ++use) {
      if (!covers(word, use)) continue;
      const unsigned epoch = kFirstEpoch + 1 + use;
      while (static_cast<int>(done($).load(ACQUIRE) - (epoch - 2)) < 0) rl::yield(1, $);
      // The word was re-armed by the last use that covered it in this slot.
      for (unsigned before = use; before >= 2;) {
        before -= 2;
        if (!covers(word, before)) continue;
        RL_ASSERT(rearmed[word][before]($) == 1);
        break;
      }
      slot[use % 2][word]($).store(value(word, use), rl::mo_relaxed);
    }
  }

  void poll(unsigned word, unsigned use) {
    unsigned seen;
    while ((seen = slot[use % 2][word]($).load(rl::mo_relaxed)) == kArmed) rl::yield(1, $);
    RL_ASSERT(seen == value(word, use));
  }

  void rearm(unsigned word, unsigned use) {
    rearmed[word][use]($) = 1;
    slot[use % 2][word]($).store(kArmed, rl::mo_relaxed);
  }

  void receive(unsigned word) {
    for (unsigned use = 0; use < kUses; ++use) {
      if (covers(word, use)) poll(word, use);
      if (!SWITCH(DONE_EARLY) && covers(word, use)) rearm(word, use);
      if (!SWITCH(NO_BLOCK_BARRIER)) block.sync();
      if (word == 0) done($).store(kFirstEpoch + 1 + use, RELEASE);
      if (SWITCH(DONE_EARLY) && covers(word, use)) rearm(word, use);
    }
  }

  void thread(unsigned index) {
    if (index < 2) {
      send(index);
    } else {
      receive(index - 2);
    }
  }
};

}  // namespace

int main(int, char** arguments) { return model::run<Oneway>(SCHEDULES, arguments); }
