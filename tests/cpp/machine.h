// Time limits that also hold on a busy machine.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace collx {

/// Measures the current duration of fifty handovers between two threads that sleep in between. It
/// is less than a millisecond on an idle machine.
inline std::chrono::nanoseconds fifty_hand_overs() {
  constexpr int kHandOvers = 50;
  std::atomic<int> turn = 0;
  const auto play = [&](int odd) {
    for (int i = odd; i < kHandOvers; i += 2) {
      for (int seen; (seen = turn.load()) != i;) turn.wait(seen);
      turn = i + 1;
      turn.notify_all();
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::thread other(play, 1);
  play(0);
  other.join();
  return std::chrono::steady_clock::now() - start;
}

/// Returns a timeout that is long enough for a rank that participates, whatever else runs.
inline uint64_t short_timeout_ns() {
  return 200'000'000 + 2 * static_cast<uint64_t>(fifty_hand_overs().count());
}

/// Checks promised durations. The tolerance grows with the slowness of the machine, measured at the
/// start and at the end.
class Stopwatch {
 public:
  std::chrono::nanoseconds elapsed() const { return Clock::now() - start_; }
  bool within(std::chrono::nanoseconds promised) const {
    const auto taken = elapsed();
    return taken < promised + 20 * std::max(before_, fifty_hand_overs());
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::chrono::nanoseconds before_ = fifty_hand_overs();
  Clock::time_point start_ = Clock::now();
};

}  // namespace collx
