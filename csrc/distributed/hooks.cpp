#include "hooks.h"

#include <c10/util/Logging.h>

#include <exception>
#include <utility>
#include <vector>

namespace collx::distributed {

namespace {

template <typename F, typename... Arguments>
void run_hooks(std::mutex& mutex, const std::map<int64_t, F>& registered, Arguments... arguments) {
  std::vector<F> hooks;
  {
    const std::lock_guard held(mutex);
    for (const auto& [id, hook] : registered) hooks.push_back(hook);
  }
  for (const F& hook : hooks) {
    try {
      hook(arguments...);
    } catch (const std::exception& error) {
      LOG(ERROR) << "collx: a hook has failed: " << error.what();
    } catch (...) {
      LOG(ERROR) << "collx: a hook has failed";
    }
  }
}

}  // namespace

void Hooks::on_completion(int64_t id, Completed hook) {
  const std::lock_guard held(mutex_);
  completed_.emplace(id, std::move(hook));
  any_.store(true, std::memory_order_relaxed);
}

void Hooks::on_failure(int64_t id, Failed hook) {
  const std::lock_guard held(mutex_);
  failed_.emplace(id, std::move(hook));
  any_.store(true, std::memory_order_relaxed);
}

void Hooks::drop_completion(int64_t id) {
  const std::lock_guard held(mutex_);
  completed_.erase(id);
  any_.store(!completed_.empty() || !failed_.empty(), std::memory_order_relaxed);
}

void Hooks::drop_failure(int64_t id) {
  const std::lock_guard held(mutex_);
  failed_.erase(id);
  any_.store(!completed_.empty() || !failed_.empty(), std::memory_order_relaxed);
}

void Hooks::completed(uint64_t key) const { run_hooks(mutex_, completed_, key); }
void Hooks::failed() const { run_hooks(mutex_, failed_); }

}  // namespace collx::distributed
