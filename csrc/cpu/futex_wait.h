// How a CPU rank waits for a peer: it spins briefly, then yields, then sleeps on a futex. If there
// are more ranks than cores (hazard 23), a spinning rank takes the core from the rank that it waits
// for.
//
// USAGE. A Doorbell is in shared memory beside the awaited data, usually one for each rank, on
// which only that rank sleeps. All-zero bytes are a valid doorbell.
//     waiter:  wait_until(bell, [&] { return flag.load(acquire) == epoch; }, deadline);
//     writer:  flag.store(epoch, release);  ring(bell);
// `ready` may read any memory, as long as every writer of that memory rings afterwards.
//
// MEMORY ORDER. Doorbells order wake-ups, never data: `ready` itself must load with acquire the
// value that the writer stored with release. No wake-up is lost, since all accesses to `sleepers`
// are read-modify-writes and therefore have one order:
//   - If the writer's access is first, the sleeper's own access reads from it (acq_rel). Therefore
//     everything before ring() is visible to the following `ready`, and the sleeper does not sleep.
//   - If the sleeper's access is first, the writer sees a sleeper and advances `rings`. The sleeper
//     read `rings` before it called `ready`. If it read the old value, the kernel refuses the sleep
//     or wakes it. If it read the new value (acquire), it sees the data.
// If the peer is awake, the writer pays one uncontended read-modify-write and no system call.
//
// LIFETIME. A sleeper that is killed leaves `sleepers` above zero. Later writers then pay a system
// call, with no other effect. No sleep is longer than kLongestSleep. If a writer is killed before
// its ring(), or cannot ring, the sleeper only notices it later.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace collx::cpu {

struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

/// The number of calls of `ready` before the thread sleeps. Use few spins if there are more ranks
/// than cores.
struct Spinning {
  int spins = 1000;
  int yields = 50;
};

inline constexpr std::chrono::milliseconds kLongestSleep{10};

namespace detail {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE_FLAG: processes that map the word at different addresses share it.
inline void futex_sleep(const std::atomic<uint32_t>& word, uint32_t seen,
                        std::chrono::nanoseconds longest) {
  const timespec limit{static_cast<time_t>(longest.count() / 1'000'000'000),
                       static_cast<long>(longest.count() % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Sleeps until `ready` returns true or the deadline has passed. Returns the last result of
/// `ready`.
template <typename Ready>
bool sleep_until(Doorbell& bell, Ready& ready, std::chrono::steady_clock::time_point deadline) {
  using Clock = std::chrono::steady_clock;
  bell.sleepers.fetch_add(1, std::memory_order_acq_rel);
  bool done = false;
  for (;;) {
    const uint32_t seen = bell.rings.load(std::memory_order_acquire);
    done = ready();
    const auto now = Clock::now();
    if (done || now >= deadline) break;
    // Signals and wake-ups for others end a sleep early, so the loop calls `ready` again.
    futex_sleep(bell.rings, seen,
                std::min<std::chrono::nanoseconds>(deadline - now, kLongestSleep));
  }
  bell.sleepers.fetch_sub(1, std::memory_order_acq_rel);
  return done;
}

}  // namespace detail

/// Returns true as soon as `ready()` does, and false if `deadline` passes first. `ready` is called
/// at least once, even if the deadline is in the past. It must not throw.
template <typename Ready>
bool wait_until(Doorbell& bell, Ready&& ready, std::chrono::steady_clock::time_point deadline,
                Spinning spinning = {}) {
  for (int i = 0; i < spinning.spins; ++i) {
    if (ready()) return true;
    detail::relax();
  }
  for (int i = 0; i < spinning.yields; ++i) {
    if (ready()) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    sched_yield();
  }
  return detail::sleep_until(bell, ready, deadline);
}

/// Wakes all threads that sleep on `bell`. Call it after the store that makes `ready` true.
inline void ring(Doorbell& bell) {
  if (bell.sleepers.fetch_add(0, std::memory_order_acq_rel) == 0) return;
  bell.rings.fetch_add(1, std::memory_order_acq_rel);
  detail::futex_wake_all(bell.rings);
}

}  // namespace collx::cpu
