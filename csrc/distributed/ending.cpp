#include "ending.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>

#include "../ops/call.h"
#include "../ops/communicator.h"
#include "../ops/enqueue.h"
#include "../ops/process_wide.h"
#if COLLX_CUDA
#include <cuda_runtime_api.h>

#include "../ops/streams.h"
#endif

namespace collx::distributed {

namespace {

/// Whether the current stream is being captured into a graph.
bool captures([[maybe_unused]] c10::Device device) {
#if COLLX_CUDA
  if (device.is_cuda()) return capturing(device);
#endif
  return false;
}

enum class End { none, completed, failed, unknown };

/// An operation that has not ended yet.
struct Awaited {
  c10::Device device;
  std::shared_ptr<Hooks> hooks;
  std::vector<uint64_t> keys;
  std::function<End()> poll;

  /// Returns whether the operation has ended. Runs the hooks if so.
  bool has_ended() const {
    End end = End::failed;
    try {
      end = poll();
    } catch (...) {  // the device is lost
    }
    if (end == End::failed) hooks->failed();
    if (end == End::completed) {
      for (const uint64_t key : keys) hooks->completed(key);
    }
    return end != End::none;
  }
};

class Poller {
 public:
  std::mutex mutex;

  /// A child has no thread.
  static Poller* in_child() { return new Poller; }

  void add(Awaited one) {
    const std::lock_guard held(mutex);
    if (!runs_) std::thread([this] { run(); }).detach();
    runs_ = true;
    awaited_.push_back(std::move(one));
    if (awaited_.size() == 1) changed_.notify_one();
  }

 private:
  static constexpr std::chrono::milliseconds kPeriod{10};

  void run() {
    (void)pthread_setname_np(pthread_self(), "collx_hooks");
#if COLLX_CUDA
    // Queries of events would end a capture in another thread.
    auto mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
#endif
    std::vector<Awaited> polled;
    for (;;) {
      {
        std::unique_lock held(mutex);
        changed_.wait(held, [&] { return !awaited_.empty() || !polled.empty(); });
        std::ranges::move(awaited_, std::back_inserter(polled));
        awaited_.clear();
      }
      for (Awaited& one : polled) {
        // Querying or destroying an event with a different current device would create a context on
        // that device.
        const OnDevice guard(one.device);
        if (one.has_ended()) one.poll = nullptr;
      }
      std::erase_if(polled, [](const Awaited& one) { return one.poll == nullptr; });
      if (!polled.empty()) std::this_thread::sleep_for(kPeriod);
    }
  }

  std::condition_variable changed_;
  std::vector<Awaited> awaited_;  // added since the last poll
  bool runs_ = false;
};

Poller& poller() { return process_wide<Poller>(); }

}  // namespace

bool Ending::failed() const { return communicator_->failure().has_value(); }

void Ending::before_raising() const {
  if (failed()) hooks_->failed();
}

void Ending::mark() {
  const c10::Device device = communicator_->options().device;
  event_.emplace(device.type());
  event_->record(current_stream(device));
}

std::shared_ptr<Ending> Ending::report(const std::shared_ptr<Hooks>& hooks,
                                       const std::shared_ptr<Communicator>& communicator,
                                       const std::vector<std::shared_ptr<PostedCall>>& posted) {
  const c10::Device device = communicator->options().device;
  if (captures(device)) return nullptr;
  auto ending = std::make_shared<Ending>(hooks, communicator);
  if (communicator->on_cuda()) {
    if (posted.empty()) {
      ending->mark();
    } else {  // runs immediately, with the stream of the calls as the current stream
      posted.back()->when_completed([&](const std::exception_ptr&) { ending->mark(); });
    }
    poller().add({device, hooks, {ending->key}, [ending] {
                    if (!ending->reached()) return End::none;
                    return ending->failed() ? End::failed : End::completed;
                  }});
  } else if (posted.empty()) {
    hooks->completed(ending->key);
  } else {
    posted.back()->when_completed(
        [hooks, device, key = ending->key](const std::exception_ptr& error) {
          if (!error) return hooks->completed(key);
          // The hook may take Python's lock, for which the poster's thread must not wait.
          poller().add({device, hooks, {}, [] { return End::failed; }});
        });
  }
  return ending;
}

void report_end(std::shared_ptr<Hooks> hooks, std::vector<c10::intrusive_ptr<c10d::Work>> works,
                std::vector<uint64_t> keys, c10::Device device) {
  if (captures(device)) return;
  poller().add({device, std::move(hooks), std::move(keys), [works = std::move(works), device] {
                  for (const auto& work : works) {
                    if (work->isCompleted()) continue;
                    // A send of Gloo only completes when a caller waits for it.
                    const bool given_up = device.is_cpu() && work.use_count() == 1;
                    return given_up ? End::unknown : End::none;
                  }
                  const bool fine = std::ranges::all_of(
                      works, [](const auto& work) { return work->isSuccess(); });
                  return fine ? End::completed : End::failed;
                }});
}

}  // namespace collx::distributed
