// A lane between two ranks, in C++'s memory model: a ring of two slots each way, and one word
// {sent, consumed} that each rank stores at the other. A rank's block has two roles of two threads
// each: one scatters, one reduces. Slots are plain memory, so that a read or an overwrite without
// an order is a data race.
//
// One call. Both ranks send, and announcements carry `consumed`. With two slots the wait before an
// announcement implies the credit, so that mutants of the credit need ONE_WAY: only rank 0 sends,
// and rank 1 tells what it has consumed after each chunk.
//
// What must hold in the memory model itself:
// - The announcement, stored with release by one thread behind the block barrier, covers the stores
//   of all threads of the role that scatters.
// - `consumed` in that word covers the loads of all threads of the other role. The roles hand their
//   progress over in shared memory, with release and acquire at the scope of the block.
// - One thread loads the peer's word with acquire before a block barrier, for all threads.
//
// Mutants: RELAXED_STORE, RELAXED_LOAD (of the peer's word by the role that reduces),
// RELAXED_PROGRESS (between the roles), NO_SEND_BARRIER (before the announcement), NO_TAKE_BARRIER
// (before the progress is told); and with ONE_WAY RELAXED_CREDIT (of the peer's word by the role
// that scatters), NO_CREDIT (no wait for what the peer has consumed).
#include "relacy_run.h"

#ifdef RELAXED_CREDIT
#define ACQUIRE_CREDIT rl::mo_relaxed
#else
#define ACQUIRE_CREDIT rl::mo_acquire
#endif
#ifdef RELAXED_PROGRESS
#define RELEASE_PROGRESS rl::mo_relaxed
#else
#define RELEASE_PROGRESS rl::mo_release
#endif

namespace {

constexpr unsigned kSlots = 2;
constexpr unsigned kChunks = 4;
constexpr unsigned kFirst = 0xFFFE;  // counters of 16 bits here, which wrap around

constexpr bool reached(unsigned seen, unsigned expected) {
  return static_cast<short>(seen - expected) >= 0;
}

struct Lanes : rl::test_suite<Lanes, 8> {
  rl::var<unsigned> slot[2][kSlots][2];  // at each rank: two words of each chunk that is sent to it
  rl::atomic<unsigned> word[2];          // at each rank: {sent, consumed} of the other one
  rl::atomic<unsigned> progress[2];      // chunks that the role that reduces is done with
  model::BlockBarrier<2> scattering[2];
  model::BlockBarrier<2> reducing[2];

  void before() {
    for (unsigned rank = 0; rank < 2; ++rank) {
      for (auto& place : slot[rank]) {
        for (auto& value : place) value($) = 0;
      }
      word[rank]($) = pack(kFirst, kFirst);
      progress[rank]($) = 0;
    }
  }

  static unsigned pack(unsigned sent, unsigned consumed) {
    return (sent & 0xFFFF) << 16 | (consumed & 0xFFFF);
  }
  static unsigned value(unsigned rank, unsigned chunk, unsigned thread) {
    return 100 * rank + 10 * chunk + thread + 1;
  }

  /// One thread waits for the credit, and for what makes its announcement worth telling.
  unsigned wait_to_send(unsigned me, unsigned chunk) {
#ifndef NO_CREDIT
    while (!reached((word[me]($).load(ACQUIRE_CREDIT) & 0xFFFF) + kSlots, kFirst + chunk + 1)) {
      rl::yield(1, $);
    }
#endif
    unsigned consumed = 0;
#ifndef ONE_WAY
    while ((consumed = progress[me]($).load(rl::mo_acquire)) + kSlots < chunk + 2) rl::yield(1, $);
#endif
    return consumed;
  }

  void scatter(unsigned me, unsigned thread) {
    const unsigned peer = 1 - me;
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      const unsigned consumed = thread == 0 ? wait_to_send(me, chunk) : 0;
      scattering[me].sync();
      slot[peer][chunk % kSlots][thread]($) = value(me, chunk, thread);
#ifndef NO_SEND_BARRIER
      scattering[me].sync();
#endif
      if (thread != 0) continue;
      word[peer]($).store(pack(kFirst + chunk + 1, kFirst + consumed), RELEASE);
    }
  }

  void reduce(unsigned me, unsigned thread) {
    for (unsigned chunk = 0; chunk < kChunks; ++chunk) {
      if (thread == 0) {
        while (!reached(word[me]($).load(ACQUIRE) >> 16, kFirst + chunk + 1)) rl::yield(1, $);
      }
      reducing[me].sync();
      RL_ASSERT(slot[me][chunk % kSlots][thread]($) == value(1 - me, chunk, thread));
#ifndef NO_TAKE_BARRIER
      reducing[me].sync();
#endif
      if (thread != 0) continue;
#ifdef ONE_WAY
      word[1 - me]($).store(pack(kFirst, kFirst + chunk + 1), RELEASE);
#else
      progress[me]($).store(chunk + 1, RELEASE_PROGRESS);
#endif
    }
  }

  void thread(unsigned index) {
    const unsigned rank = index / 4;
    const bool scatters = index % 4 < 2;
#ifdef ONE_WAY
    if (scatters != (rank == 0)) return;
#endif
    if (scatters) {
      scatter(rank, index % 2);
    } else {
      reduce(rank, index % 2);
    }
  }
};

}  // namespace

int main() { return model::run<Lanes>(SCHEDULES); }
