// A lane between two ranks, in the C++ memory model: a ring of two slots in each direction, and one
// word {sent, consumed} that each rank stores at the other. A rank has two roles of two threads
// each, one that scatters and one that reduces, and a thread that informs the peer. Slots are plain
// memory, so that an unordered read or overwrite is a data race.
//
// There is one call. Both ranks send, and consumption is announced together with sends. With two
// slots, the wait before that implies the credit, so that mutants of the credit need ONE_WAY: only
// rank 0 sends, and rank 1 announces its consumption.
//
// Properties that must hold in the memory model itself:
// - One thread of a role publishes its progress after its barrier, with release. The thread that
//   informs the peer loads it with acquire, and stores the peer's word with release. So `sent`
//   covers the stores of all threads of the role that scatters, and `consumed` the loads of all
//   threads of the other role.
// - One thread loads the peer's word with acquire before a barrier of its role, for all threads.
//
// Mutants: RELAXED_STORE, RELAXED_LOAD (of the peer's word by the role that reduces),
// RELAXED_PROGRESS, NO_SEND_BARRIER and NO_TAKE_BARRIER (before progress is published); and with
// ONE_WAY, RELAXED_CREDIT (of the peer's word by the role that scatters) and NO_CREDIT (no wait for
// the peer's consumption).
#include "relacy_run.h"

#define ACQUIRE_CREDIT (SWITCH(RELAXED_CREDIT) ? rl::mo_relaxed : rl::mo_acquire)
#define RELEASE_PROGRESS (SWITCH(RELAXED_PROGRESS) ? rl::mo_relaxed : rl::mo_release)

namespace {

constexpr unsigned kSlots = 2;
constexpr unsigned kChunks = 4;
constexpr unsigned kFirst = 0xFFFE;  // the counters have 16 bits here and wrap around

constexpr bool reached(unsigned seen, unsigned expected) {
  return static_cast<short>(seen - expected) >= 0;
}

struct Lanes : rl::test_suite<Lanes, 10> {
  rl::var<unsigned> slot[2][kSlots][2];  // at each rank: two words of each chunk that is sent to it
  rl::atomic<unsigned> word[2];          // at each rank: {sent, consumed} of the other rank
  rl::atomic<unsigned> stored[2];        // chunks that the scattering role has completed
  rl::atomic<unsigned> used[2];          // chunks that the reducing role has completed
  model::BlockBarrier<2> scattering[2];
  model::BlockBarrier<2> reducing[2];

  void before() {
    for (unsigned rank = 0; rank < 2; ++rank) {
      for (auto& place : slot[rank]) {
        for (auto& value : place) value($) = 0;
      }
      word[rank]($) = pack(kFirst, kFirst);
      stored[rank]($) = 0;
      used[rank]($) = 0;
    }
  }

  static unsigned pack(unsigned sent, unsigned consumed) {
    return (sent & 0xFFFF) << 16 | (consumed & 0xFFFF);
  }
  static unsigned value(unsigned rank, unsigned chunk, unsigned thread) {
    return 100 * rank + 10 * chunk + thread + 1;
  }

  void scatter(unsigned me, unsigned thread) {
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      while (!SWITCH(NO_CREDIT) && thread == 0 &&
             !reached((word[me]($).load(ACQUIRE_CREDIT) & 0xFFFF) + kSlots, kFirst + chunk + 1)) {
        rl::yield(1, $);
      }
      scattering[me].sync();
      slot[1 - me][chunk % kSlots][thread]($) = value(me, chunk, thread);
      if (!SWITCH(NO_SEND_BARRIER)) scattering[me].sync();
      if (thread == 0) stored[me]($).store(chunk + 1, RELEASE_PROGRESS);
    }
  }

  void reduce(unsigned me, unsigned thread) {
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      if (thread == 0) {
        while (!reached(word[me]($).load(ACQUIRE) >> 16, kFirst + chunk + 1)) rl::yield(1, $);
      }
      reducing[me].sync();
      RL_ASSERT(slot[me][chunk % kSlots][thread]($) == value(1 - me, chunk, thread));
      if (!SWITCH(NO_TAKE_BARRIER)) reducing[me].sync();
      if (thread == 0) used[me]($).store(chunk + 1, RELEASE_PROGRESS);
    }
  }

  /// Informs the peer until it has everything that it needs.
  void tell(unsigned me) {
    unsigned told = 0;
    while (told < kChunks) {
      const unsigned is_used = used[me]($).load(rl::mo_acquire);
      const unsigned is_stored = stored[me]($).load(rl::mo_acquire);
      const unsigned most = is_used < kChunks ? is_used + kSlots - 1 : kChunks;
      const unsigned both = is_stored < most ? is_stored : most;
      const unsigned next = !SWITCH(ONE_WAY) ? both : me == 0 ? is_stored : is_used;
      if (next == told) {
        rl::yield(1, $);
        continue;
      }
      told = next;
      const unsigned sent = next < is_stored ? next : is_stored;
      word[1 - me]($).store(pack(kFirst + sent, kFirst + is_used), RELEASE);
    }
  }

  void thread(unsigned index) {
    const unsigned rank = index / 5, role = index % 5;
    if (SWITCH(ONE_WAY) && role < 4 && (role < 2) != (rank == 0)) return;
    if (role < 2) {
      scatter(rank, role);
    } else if (role < 4) {
      reduce(rank, role - 2);
    } else {
      tell(rank);
    }
  }
};

}  // namespace

int main(int, char** arguments) { return model::run<Lanes>(SCHEDULES, arguments); }
