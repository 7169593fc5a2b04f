#include "watchdog.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/failure.h"
#include "../protocol/progress.h"
#include "call.h"
#include "communicator.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include "../cuda/device.h"
#endif

namespace collx {

namespace {

using Clock = std::chrono::steady_clock;

Progress progress_of(Communicator& communicator, int rank) {
#if COLLX_CUDA
  if (communicator.on_cuda()) return cuda::progress_of(communicator.cuda_view(), rank);
#endif
  return cpu::progress_of(communicator.cpu_view(), rank);
}

/// Of this rank. Without regions only calls of the process group are known.
Progress own_progress(Communicator& communicator) {
  if (communicator.failure()) return {communicator.calls(), false};
  if (communicator.marks()->in_group()) return {communicator.calls(), true};
  if (!communicator.has_regions()) return {communicator.calls(), false};
  return progress_of(communicator, communicator.options().rank);
}

/// The name of a call; empty where replays of graphs have numbers that the host does not count.
std::string name_of_call(Communicator& communicator, uint64_t number) {
#if COLLX_CUDA
  if (communicator.streams().has_captured()) return {};
#endif
  const char* const op = communicator.marks()->op(number, communicator.calls());
  return op == nullptr ? std::string() : std::string(".") + op;
}

/// Empty if the call has completed meanwhile.
std::string missing_in_words(Communicator& communicator, uint64_t number) {
  if (communicator.marks()->in_group()) return "unknown to the process group";
  if (!communicator.has_regions()) return {};
  const int own = communicator.options().rank, world = communicator.options().world_size;
  std::array<Progress, kMaxRanks> of{};
  // The own rank's at last: the call waits still.
  for (int step = 1; step <= world; ++step) {
    of[(own + step) % world] = progress_of(communicator, (own + step) % world);
  }
  if (!of[own].in_call || of[own].completed != number) return {};
  const uint32_t missing = missing_ranks(of.data(), own, world);
  std::string words;
  for (int rank = 0; rank < world; ++rank) {
    if ((missing >> rank & 1) == 0) continue;
    words += (words.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  return words.empty() ? "none, all ranks have begun it" : words;
}

std::string describe_wait(Communicator& communicator, uint64_t number, Clock::duration waited) {
  const std::string missing = missing_in_words(communicator, number);
  if (missing.empty()) return {};
  const CommunicatorOptions& o = communicator.options();
  std::ostringstream out;
  out << "collx" << name_of_call(communicator, number) << ": the call has not completed after "
      << std::chrono::duration<double>(waited).count() << " s (timeout "
      << std::chrono::duration<double>(communicator.timeout()).count()
      << " s); missing: " << missing << " (communicator \"" << o.name << "\", sequence number "
      << number << ", this is rank " << o.rank << ')';
  return out.str();
}

struct Watched {
  Communicator* communicator;
  Clock::time_point due;
  // Of the last sample: the call that was under way, and since when at least.
  std::optional<uint64_t> call;
  Clock::time_point since;
  bool logged;
};

constexpr std::chrono::milliseconds kShortestPeriod{10};

Clock::duration period_of(const Communicator& communicator) {
  return std::max<Clock::duration>(communicator.timeout() / 12, kShortestPeriod);
}

/// The calls to log; usually none.
std::string sample(Watched& watched) {
  const OnDevice guard(watched.communicator->options().device);
  const Progress own = own_progress(*watched.communicator);
  const Clock::time_point now = Clock::now();
  watched.due = now + period_of(*watched.communicator);
  if (!own.in_call || watched.call != own.completed) {
    watched.call = own.in_call ? std::optional(own.completed) : std::nullopt;
    watched.since = now;
    watched.logged = false;
    return {};
  }
  // Not the timeout divided by three, which is in milliseconds and rounds down.
  if (watched.logged || 3 * (now - watched.since) <= watched.communicator->timeout()) return {};
  std::string words = describe_wait(*watched.communicator, own.completed, now - watched.since);
  watched.logged = !words.empty();
  return words;
}

class Watchdog {
 public:
  std::mutex mutex;  // held while a communicator is looked at

  void enter(Communicator& communicator) {
    const std::lock_guard held(mutex);
    watched_.push_back({&communicator, Clock::now() + period_of(communicator), {}, {}, false});
    if (!runs_) std::thread([this] { run(); }).detach();
    runs_ = true;
    changed_.notify_one();
  }

  void timeout_changed(const Communicator& communicator) {
    const std::lock_guard held(mutex);
    for (Watched& one : watched_) {
      if (one.communicator == &communicator) one.due = Clock::now();
    }
    changed_.notify_one();
  }

  void leave(const Communicator& communicator) {
    const std::lock_guard held(mutex);
    std::erase_if(watched_, [&](const Watched& w) { return w.communicator == &communicator; });
    changed_.notify_one();
  }

 private:
  void run() {
    (void)pthread_setname_np(pthread_self(), "collx_watchdog");
#if COLLX_CUDA
    // Reads of a region would end a capture in another thread.
    auto mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
#endif
    std::unique_lock held(mutex);
    while (!watched_.empty()) {
      Watched& next =
          *std::min_element(watched_.begin(), watched_.end(),
                            [](const Watched& a, const Watched& b) { return a.due < b.due; });
      if (const auto due = next.due; Clock::now() < due) {
        changed_.wait_until(held, due);
        continue;
      }
      std::string words;
      try {
        words = sample(next);
      } catch (const std::exception& error) {  // the device is lost
        words = "collx: the watchdog of communicator \"" + next.communicator->options().name +
                "\" ends: " + error.what();
        std::erase_if(watched_, [&](const Watched& w) { return &w == &next; });
      }
      if (words.empty()) continue;
      held.unlock();  // writing the log may be slow
      LOG(WARNING) << words;
      held.lock();
    }
    runs_ = false;
  }

  std::condition_variable changed_;
  std::vector<Watched> watched_;
  bool runs_ = false;  // the thread
};

Watchdog*& instance();

// Made when the library is loaded, as the registry is.
[[maybe_unused]] Watchdog*& made_at_load = instance();

// The lock is held across fork(). A child has no thread, and the communicators are not its own.
void before_fork() { instance()->mutex.lock(); }
void after_fork_in_parent() { instance()->mutex.unlock(); }
void after_fork_in_child() { instance() = new Watchdog; }

Watchdog*& instance() {
  // Never destroyed: the thread may run until the process ends.
  static Watchdog* watchdog = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new Watchdog;
  }();
  return watchdog;
}

}  // namespace

void watchdog::enter(Communicator& communicator) { instance()->enter(communicator); }
void watchdog::timeout_changed(const Communicator& communicator) {
  instance()->timeout_changed(communicator);
}
void watchdog::leave(const Communicator& communicator) { instance()->leave(communicator); }

}  // namespace collx
