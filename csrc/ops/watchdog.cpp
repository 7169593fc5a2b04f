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
#include <utility>
#include <vector>

#include "../protocol/progress.h"
#include "call.h"
#include "communicator.h"
#include "process_wide.h"

namespace collx {

namespace {

using Clock = std::chrono::steady_clock;

/// The progress of this rank. Without regions, only calls through the process group are known.
Progress own_progress(Communicator& communicator) {
  if (communicator.failure()) return {communicator.calls(), false};
  if (communicator.log().in_group()) return {communicator.calls(), true};
  if (!communicator.has_regions()) return {communicator.calls(), false};
  return communicator.progress_of(communicator.options().rank);
}

/// The name of a call. Empty if graphs have captured calls, since the host does not count replays.
std::string name_of_call(Communicator& communicator, uint64_t number) {
  if (communicator.has_captured()) return {};
  const std::optional<LoggedCall> call = communicator.log().find(number);
  return call ? std::string(".") + call->op : std::string();
}

/// Bit mask of the ranks that the call waits for. Empty if it has completed in the meantime.
std::optional<uint32_t> awaited_ranks(Communicator& communicator, uint64_t number) {
  const int own = communicator.options().rank, world = communicator.options().world_size;
  std::array<Progress, kMaxRanks> of{};
  // This rank is read last, to check that the call is still waiting.
  for (int step = 1; step <= world; ++step) {
    of[(own + step) % world] = communicator.progress_of((own + step) % world);
  }
  if (!of[own].in_call || of[own].completed != number) return {};
  return missing_ranks(of.data(), own, world);
}

/// Names the missing ranks. Empty if the call has completed in the meantime.
std::string missing_in_words(Communicator& communicator, uint64_t number) {
  if (communicator.log().in_group()) return "unknown to the process group";
  if (!communicator.has_regions()) return {};
  const std::optional<uint32_t> missing = awaited_ranks(communicator, number);
  if (!missing) return {};
  std::string words;
  for (int rank = 0; rank < communicator.options().world_size; ++rank) {
    if ((*missing >> rank & 1) == 0) continue;
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
  Clock::time_point sampled;
  // From the last sample: the call in progress, and the time since which it has been so.
  std::optional<uint64_t> call;
  Clock::time_point since;
  bool logged;
};

constexpr std::chrono::milliseconds kShortestPeriod{10};
// Where samples also measure waits. A sample takes about 0.1 ms for each rank that it reads.
constexpr std::chrono::milliseconds kLongestPeriod{25};

Clock::duration period_of(const Communicator& communicator) {
  const auto period = std::max<Clock::duration>(communicator.timeout() / 12, kShortestPeriod);
  return communicator.samples_waits() ? std::min<Clock::duration>(period, kLongestPeriod) : period;
}

/// The text to log; usually empty.
std::string sample(Watched& watched) {
  const OnDevice guard(watched.communicator->options().device);
  const Progress own = own_progress(*watched.communicator);
  const Clock::time_point now = Clock::now();
  const Clock::duration since_last = now - std::exchange(watched.sampled, now);
  watched.due = now + period_of(*watched.communicator);
  if (own.in_call && watched.communicator->samples_waits()) {
    // Short waits are in few samples, and each of these counts for more than its wait.
    if (const auto ranks = awaited_ranks(*watched.communicator, own.completed)) {
      watched.communicator->add_wait(*ranks, since_last);
    }
  }
  if (!own.in_call || watched.call != own.completed) {
    watched.call = own.in_call ? std::optional(own.completed) : std::nullopt;
    watched.since = now;
    watched.logged = false;
    return {};
  }
  // Multiplies instead of dividing the timeout, which is in milliseconds and would round down.
  if (watched.logged || 3 * (now - watched.since) <= watched.communicator->timeout()) return {};
  std::string words = describe_wait(*watched.communicator, own.completed, now - watched.since);
  watched.logged = !words.empty();
  return words;
}

class Watchdog {
 public:
  std::mutex mutex;  // held while a communicator is read

  /// A child has no thread, and the communicators belong to the parent.
  static Watchdog* in_child() { return new Watchdog; }

  void enter(Communicator& communicator) {
    const std::lock_guard held(mutex);
    const Clock::time_point now = Clock::now();
    watched_.push_back({&communicator, now + period_of(communicator), now, {}, {}, false});
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
  bool runs_ = false;  // whether the thread runs
};

Watchdog& instance() { return process_wide<Watchdog>(); }
[[maybe_unused]] Watchdog& watchdog_at_load = instance();

}  // namespace

void watchdog::enter(Communicator& communicator) { instance().enter(communicator); }
void watchdog::timeout_changed(const Communicator& communicator) {
  instance().timeout_changed(communicator);
}
void watchdog::leave(const Communicator& communicator) { instance().leave(communicator); }

}  // namespace collx
