// How a CPU rank waits for a peer: spin briefly, then yield, then sleep on a futex. Ranks may
// outnumber cores (hazard 23), and then a rank that spins keeps the core from the rank that it
// waits for.
//
// USAGE. A Doorbell lies in shared memory beside what is awaited, usually one per rank, on which
// only that rank sleeps. All-zero bytes are a valid doorbell.
//     waiter:  wait_until(bell, [&] { return flag.load(acquire) == epoch; }, deadline);
//     writer:  flag.store(epoch, release);  ring(bell);
// `ready` may look at any memory, as long as every writer of that memory rings afterwards.
//
// MEMORY ORDER. Doorbells order wake-ups, never data: `ready` itself has to load with acquire what
// the writer stored with release. No wake-up is lost, since all accesses to `sleepers` are
// read-modify-writes and thus in one order:
//   - the writer's comes first: the sleeper's own then reads from it (acq_rel), so everything
//     before ring() is visible to the `ready` that follows, and it does not sleep;
//   - the sleeper's comes first: the writer sees a sleeper and advances `rings`. The sleeper took
//     its value of `rings` before it asked `ready`; either it took the old one, and the kernel
//     refuses the sleep or wakes it, or it read the new one (acquire) and sees the data.
// An awake peer costs the writer one uncontended read-modify-write and no system call.
//
// LIFETIME. A sleeper that is killed leaves `sleepers` above zero, which costs later writers a
// system call and nothing else. No sleep is longer than kLongestSleep, so a writer that was killed
// before its ring(), or that cannot ring, is only noticed later.
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

/// How often `ready` is asked before the thread sleeps. Few spins where ranks outnumber cores.
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

// Not FUTEX_PRIVATE_FLAG: the word is shared by processes that map it at different addresses.
inline void futex_sleep(const std::atomic<uint32_t>& word, uint32_t seen,
                        std::chrono::nanoseconds longest) {
  const timespec limit{static_cast<time_t>(longest.count() / 1'000'000'000),
                       static_cast<long>(longest.count() % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Sleeps until `ready`, or until the deadline has passed. Returns the last answer of `ready`.
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
    // Signals and wake-ups for others end a sleep early: the loop asks `ready` again.
    futex_sleep(bell.rings, seen,
                std::min<std::chrono::nanoseconds>(deadline - now, kLongestSleep));
  }
  bell.sleepers.fetch_sub(1, std::memory_order_acq_rel);
  return done;
}

}  // namespace detail

/// Returns true as soon as `ready()` does, false once `deadline` has passed without. `ready` is
/// asked at least once, also with a deadline in the past. It must not throw.
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
