// Hooks of a group: functions that run when an operation has completed or has failed.
//
// PyTorch's Hooks.hpp specifies the contract. If no hook is registered, a call only reads one
// number.
#pragma once

#include <c10/util/Logging.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace collx::distributed {

/// The hooks of one event, and their number among those of all events.
template <typename... Arguments>
class EventHooks {
 public:
  using Hook = std::function<void(Arguments...)>;

  explicit EventHooks(std::atomic<size_t>& registered) : registered_(registered) {}

  void add(int64_t id, Hook hook) {
    const std::lock_guard held(mutex_);
    if (hooks_.emplace(id, std::move(hook)).second) registered_.fetch_add(1);
  }
  void drop(int64_t id) {
    const std::lock_guard held(mutex_);
    registered_.fetch_sub(hooks_.erase(id));
  }

  /// Runs the hooks on the calling thread, without a lock, so that they may unregister themselves.
  /// Exceptions of hooks are logged.
  void operator()(Arguments... arguments) const {
    std::unique_lock held(mutex_);
    const std::map<int64_t, Hook> hooks = hooks_;
    held.unlock();
    for (const auto& [id, hook] : hooks) {
      try {
        hook(arguments...);
      } catch (const std::exception& error) {
        LOG(ERROR) << "collx: a hook has failed: " << error.what();
      } catch (...) {
        LOG(ERROR) << "collx: a hook has failed";
      }
    }
  }

 private:
  std::atomic<size_t>& registered_;
  mutable std::mutex mutex_;
  std::map<int64_t, Hook> hooks_;
};

class Hooks {
  std::atomic<size_t> registered_{0};
  std::atomic<uint64_t> keys_{0};

 public:
  EventHooks<uint64_t> completed{registered_};  // they get the key of the work
  EventHooks<> failed{registered_};

  bool any() const { return registered_.load(std::memory_order_relaxed) != 0; }

  /// Returns a key that differs from the keys of all other works, which are addresses.
  uint64_t new_key() { return uint64_t{1} << 63 | keys_.fetch_add(1, std::memory_order_relaxed); }
};

}  // namespace collx::distributed
