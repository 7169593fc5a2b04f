// The barrier between blocks, in the C++ memory model: two ranks of one block with two threads
// each. Thread 0 of a block exchanges flags that count up (store with release, load with acquire).
// Both threads write and read plain data, which the block barrier and the flags synchronize.
// Between two barriers, each thread of a block reads what the other thread of the peer wrote before
// the first one. Then the data is overwritten for the next call. A data race on it is an error.
//
// Mutants: RELAXED_STORE, RELAXED_LOAD, NO_BLOCK_BARRIER (threads do not meet before the flag),
// NO_CLOSING (hazard 11).
#include "relacy_run.h"

namespace {

constexpr unsigned kCalls = 2;

struct Barrier : rl::test_suite<Barrier, 4> {
  rl::var<unsigned> input[2][2];  // of each rank, by thread
  rl::atomic<unsigned> flag[2];   // of each rank, set by the other rank
  model::BlockBarrier<2> block[2];

  void before() {
    for (auto& f : flag) f($) = 0xFFFFFFFEu;  // counts wrap around
  }

  void sync(unsigned me, unsigned thread, unsigned& epoch) {
    if (!SWITCH(NO_BLOCK_BARRIER)) block[me].sync();
    ++epoch;
    if (thread == 0) {
      flag[1 - me]($).store(epoch, RELEASE);
      while (static_cast<int>(flag[me]($).load(ACQUIRE) - epoch) < 0) rl::yield(1, $);
    }
    block[me].sync();
  }

  void thread(unsigned index) {
    const unsigned me = index / 2, thread = index % 2;
    unsigned epoch = 0xFFFFFFFEu;
    for (unsigned call = 1; call <= kCalls; ++call) {
      input[me][thread]($) = call;
      sync(me, thread, epoch);
      RL_ASSERT(input[1 - me][1 - thread]($) == call);
      if (SWITCH(NO_CLOSING)) {
        block[me].sync();
      } else {
        sync(me, thread, epoch);
      }
    }
  }
};

}  // namespace

int main(int, char** arguments) { return model::run<Barrier>(SCHEDULES, arguments); }
