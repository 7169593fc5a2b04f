// Ranks as threads of one process. Each rank has its own region, status and buffers.
#pragma once

#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/calls.h"
#include "cpu/control.h"

namespace collx::cpu {

inline constexpr uint64_t kPatientNs = 60'000'000'000;

/// Whether large calls between `world` threads would take minutes. What the sanitizers check does
/// not depend on the size: fewer threads with large calls, and more with small ones, suffice.
inline bool large_calls_are_slow(int world) {
#if defined(__SANITIZE_THREAD__)
  return world > 2;
#elif defined(__SANITIZE_ADDRESS__)
  return world > 4;
#else
  return world > 8;
#endif
}

/// The world sizes of tests with many calls. Under ThreadSanitizer, eight threads find the races of
/// sixteen, and sooner.
inline std::vector<int> worlds() {
#if defined(__SANITIZE_THREAD__)
  return {1, 2, 3, 4, 8};
#else
  return {1, 2, 3, 4, 8, 16};
#endif
}

class Ranks {
 public:
  explicit Ranks(int world, uint64_t payload_bytes = kDefaultPayloadBytes,
                 uint64_t timeout_ns = kPatientNs, bool check = false)
      : world_(world), layout_(cpu_layout(world, payload_bytes)), statuses_(size_t(world)) {
    view_.layout = layout_;
    view_.timeout_ns = timeout_ns;
    view_.world = world;
    view_.check = check;
    for (int r = 0; r < world; ++r) {
      regions_.emplace_back(allocate(layout_.total_bytes), std::free);
      view_.region[r] = regions_.back().get();
      initialize(view_.region[r], layout_);
    }
  }

  int world() const { return world_; }
  const CpuLayout& layout() const { return layout_; }
  char* region(int r) const { return view_.region[r]; }
  const HostStatus& status(int r) const { return statuses_[size_t(r)]; }
  const StatusRecord& record(int r) const { return status(r).by_host.record; }

  CpuView view(int r) {
    CpuView view = view_;
    view.rank = r;
    view.status = &statuses_[size_t(r)];
    return view;
  }

  void start_epochs_at(uint32_t epoch) {
    for (int r = 0; r < world_; ++r) set_epochs(region(r), layout_, epoch);
  }

  /// Runs body(rank) on a thread for each rank and joins them. The threads begin together, since
  /// one that starts late could count as missing.
  template <typename Body>
  void run(Body body) const {
    std::barrier begun(world_);
    const auto begin_and_run = [&](int rank) {
      begun.arrive_and_wait();
      body(rank);
    };
    std::vector<std::thread> threads;
    for (int r = 0; r < world_; ++r) threads.emplace_back(begin_and_run, r);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  static char* allocate(uint64_t bytes) {
    // Regions contain old bytes, like reused mappings, so that a test fails if it relies on zeros
    // that initialize() does not write.
    char* const region =
        static_cast<char*>(std::aligned_alloc(4096, round_up<uint64_t>(bytes, 4096)));
    std::memset(region, 0xa5, bytes);
    return region;
  }

  int world_;
  CpuLayout layout_;
  CpuView view_{};
  std::vector<HostStatus> statuses_;
  std::vector<std::unique_ptr<char, decltype(&std::free)>> regions_;
};

}  // namespace collx::cpu
