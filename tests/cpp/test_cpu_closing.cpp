// Hazard 11: an input that is overwritten as soon as the call returns, while a peer is slow.
#include <gtest/gtest.h>
#include <pthread.h>

#include <chrono>
#include <csignal>

#include "cpu_ranks.h"

namespace collx::cpu {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kNumel = 8 << 20;
constexpr float kUnwritten = -1.0f;

std::atomic<bool> stopped, released;

// Holds the thread that gets the signal wherever it is, as a scheduler may.
void hold(int) {
  stopped = true;
  while (!released) sched_yield();
}

template <typename Condition>
void wait_for(Condition condition) {
  while (!condition()) std::this_thread::sleep_for(20us);
}

struct Outcome {
  bool held_in_time;         // rank 1 had begun to read and had not finished
  bool returned_while_held;  // rank 0's call
  bool result_right;         // on rank 1, although rank 0 overwrote its input at once
};

/// Stops rank 1 in the midst of reading, and lets rank 0 overwrite its input when it may.
Outcome overwrite_while_peer_is_held(Ranks& ranks) {
  std::vector<float> inputs[2], outputs[2];
  for (int r = 0; r < 2; ++r) {
    inputs[r].assign(kNumel, 1.0f);
    outputs[r].assign(kNumel, kUnwritten);
  }
  stopped = released = false;
  std::atomic<bool> returned = false;
  const auto call = [&](int rank) {
    AllreduceCall call = make_call(inputs[rank].data(), outputs[rank].data(), kNumel,
                                   DType::float32, ReduceOp::sum, Algorithm::oneshot_pull);
    for (int p = 0; p < 2; ++p) call.peer_input[p] = inputs[p].data();
    EXPECT_TRUE(allreduce(ranks.view(rank), call));
  };
  std::thread slow([&] { call(1); });
  std::thread fast([&] {
    call(0);
    std::fill(inputs[0].begin(), inputs[0].end(), 1000.0f);
    returned = true;
  });
  const auto element = [&](size_t i) { return std::atomic_ref(outputs[1][i]).load(); };
  wait_for([&] { return element(0) != kUnwritten; });
  pthread_kill(slow.native_handle(), SIGUSR1);
  wait_for([&] { return stopped.load(); });
  Outcome outcome{};
  outcome.held_in_time = element(kNumel - 1) == kUnwritten;
  std::this_thread::sleep_for(200ms);
  outcome.returned_while_held = returned;
  released = true;
  slow.join();
  fast.join();
  outcome.result_right =
      std::all_of(outputs[1].begin(), outputs[1].end(), [](float x) { return x == 2.0f; });
  return outcome;
}

/// Until rank 1 was caught in the act.
template <typename Prepare>
Outcome catch_in_the_act(Prepare prepare) {
  for (int attempt = 0; attempt < 50; ++attempt) {
    Ranks ranks(2);
    prepare(ranks);
    const Outcome outcome = overwrite_while_peer_is_held(ranks);
    if (outcome.held_in_time) return outcome;
  }
  ADD_FAILURE() << "rank 1 was never stopped in time";
  return {};
}

class ClosingBarrier : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "ThreadSanitizer delays signals until the call is over";
#endif
    saved_ = std::signal(SIGUSR1, hold);
  }
  void TearDown() override { std::signal(SIGUSR1, saved_); }

 private:
  void (*saved_)(int) = SIG_DFL;
};

TEST_F(ClosingBarrier, keeps_an_input_until_the_slowest_peer_has_read_it) {
  const Outcome outcome = catch_in_the_act([](Ranks&) {});
  EXPECT_FALSE(outcome.returned_while_held);
  EXPECT_TRUE(outcome.result_right);
}

// Negative control: rank 1 says that it has finished before it has begun.
TEST_F(ClosingBarrier, without_it_the_peer_reads_what_came_later) {
  const Outcome outcome = catch_in_the_act([](Ranks& ranks) {
    published(ranks.region(1), ranks.layout(), Channel::end_barrier, Word::arrived) = 1;
  });
  EXPECT_TRUE(outcome.returned_while_held);
  EXPECT_FALSE(outcome.result_right);
}

}  // namespace
}  // namespace collx::cpu
