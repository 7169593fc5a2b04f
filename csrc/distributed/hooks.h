// Hooks of a group: functions that run when an operation has completed or has failed.
//
// PyTorch's Hooks.hpp specifies the contract. If no hook is registered, a call only reads one flag.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

namespace collx::distributed {

class Hooks {
 public:
  /// `key` identifies the work that has completed.
  using Completed = std::function<void(uint64_t key)>;
  using Failed = std::function<void()>;

  bool any() const { return any_.load(std::memory_order_relaxed); }

  void on_completion(int64_t id, Completed hook);
  void on_failure(int64_t id, Failed hook);
  void drop_completion(int64_t id);
  void drop_failure(int64_t id);

  /// Run the hooks on the calling thread, without a lock, so that they may unregister themselves.
  /// Exceptions of hooks are logged.
  void completed(uint64_t key) const;
  void failed() const;

  /// Returns a key that differs from the keys of all other works, which are addresses.
  uint64_t new_key() { return kOwn | keys_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kOwn = uint64_t{1} << 63;

  std::atomic<bool> any_{false};
  std::atomic<uint64_t> keys_{0};
  mutable std::mutex mutex_;
  std::map<int64_t, Completed> completed_;
  std::map<int64_t, Failed> failed_;
};

}  // namespace collx::distributed
