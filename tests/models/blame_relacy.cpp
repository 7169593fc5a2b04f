// Failure notes on the CPU, in the C++ memory model. The wait of rank 0 for rank 1 has timed out:
// it leaves its note, sets the poison words and follows the chain. Rank 1 may be outside of a call,
// or enter one, in which its wait also times out and it leaves a note. Rank 2 arrives later and
// reads the existing notes. All ranks must have the same verdict: rank 1 is missing, or it waited
// for another rank.
//
// Mutants: NOTE_BEHIND (the note is written after its word), RELAXED_STORE, RELAXED_LOAD,
// LOOK_FIRST (a call reads the poison word before it sets busy), NOTES_FIRST (notes are read before
// the state of calls), LEAVE_FIRST (a call ends before it has left its note), RELAXED_MARK (busy
// and poison are not ordered).
#include "relacy_run.h"

#define TOTAL (SWITCH(RELAXED_MARK) ? rl::mo_acq_rel : rl::mo_seq_cst)
#define TOTAL_LOAD (SWITCH(RELAXED_MARK) ? rl::mo_acquire : rl::mo_seq_cst)

namespace {

constexpr unsigned kRanks = 3;

struct Blame : rl::test_suite<Blame, kRanks> {
  rl::var<unsigned> note[kRanks][2];  // [owner of the inbox][rank]: 1 + the rank that it waited for
  rl::atomic<unsigned> left[kRanks][2];
  rl::atomic<unsigned> poison[kRanks];
  rl::atomic<unsigned> busy;  // of rank 1
  rl::var<unsigned> verdict[kRanks];
  rl::atomic<unsigned> answered;  // ranks that have reached a verdict

  void before() {
    for (auto& row : left) {
      for (auto& word : row) word($) = 0;
    }
    for (auto& word : poison) word($) = 0;
    busy($) = 0;
    answered($) = 0;
    for (auto& v : verdict) v($) = 0;
  }

  void leave_note(unsigned rank, unsigned missed) {
    for (unsigned owner = 0; owner < kRanks; ++owner) {
      if (!SWITCH(NOTE_BEHIND)) note[owner][rank]($) = missed;
      left[owner][rank]($).store(1, RELEASE);
      if (SWITCH(NOTE_BEHIND)) note[owner][rank]($) = missed;
    }
  }

  /// Finds the verdict of the notes in `owner`'s inbox.
  void follow(unsigned owner) {
    for (;;) {
      bool noted = SWITCH(NOTES_FIRST) && left[owner][1]($).load(ACQUIRE) != 0;
      const bool quiet = poison[1]($).load(TOTAL_LOAD) != 0 && busy($).load(TOTAL_LOAD) == 0;
      if (!SWITCH(NOTES_FIRST)) noted = left[owner][1]($).load(ACQUIRE) != 0;
      if (noted) {
        verdict[owner]($) = note[owner][1]($);
        break;
      }
      if (quiet) {
        verdict[owner]($) = note[owner][0]($);
        break;
      }
      rl::yield(1, $);
    }
    answered($).fetch_add(1, rl::mo_acq_rel);
  }

  void call_of_rank_1() {
    if (!SWITCH(LOOK_FIRST)) busy($).exchange(1, TOTAL);
    const bool poisoned = poison[1]($).load(TOTAL_LOAD) != 0;
    if (poisoned) {
      if (!SWITCH(LOOK_FIRST)) busy($).store(0, rl::mo_release);
      return;
    }
    if (SWITCH(LOOK_FIRST)) busy($).exchange(1, TOTAL);
    while (poison[1]($).load(ACQUIRE) == 0) rl::yield(1, $);
    if (!SWITCH(LEAVE_FIRST)) leave_note(1, 3);
    busy($).store(0, rl::mo_release);
    if (SWITCH(LEAVE_FIRST)) leave_note(1, 3);
  }

  void thread(unsigned rank) {
    if (rank == 1) {
      call_of_rank_1();
      return;
    }
    if (rank == 0) {
      leave_note(0, 2);
      for (auto& word : poison) {
        unsigned unmarked = 0;
        word($).compare_exchange_strong(unmarked, 1, TOTAL);
      }
    } else {
      while (poison[2]($).load(ACQUIRE) == 0) rl::yield(1, $);
    }
    follow(rank);
  }

  void after() { RL_ASSERT(verdict[0]($) == verdict[2]($)); }
};

}  // namespace

int main(int, char** arguments) { return model::run<Blame>(SCHEDULES, arguments); }
