// Limits in time that hold on a machine that is busy with other things.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace collx {

/// How long this machine takes now for fifty hand-overs between threads that sleep in between.
/// Below a millisecond where nothing else runs.
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

/// A time-out of which a rank that is there makes use only in part, whatever else runs.
inline uint64_t short_timeout_ns() {
  return 200'000'000 + 2 * static_cast<uint64_t>(fifty_hand_overs().count());
}

/// For what is promised to be done within a time: as much again as the machine is slower, at the
/// start or at the end.
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
