#include "registry.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "communicator.h"

namespace collx::registry {

namespace {

struct NameHash {
  using is_transparent = void;  // look-ups by string_view make no std::string
  size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
};

struct Entry {
  const Communicator* identity;
  // Weak: regions belong to the Python object, so nothing here may outlive it.
  std::weak_ptr<Communicator> communicator;
};

constexpr int kMaxDevices = 64;

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, Entry, NameHash, std::equal_to<>> entries;
  std::array<std::atomic<int>, kMaxDevices> on_device{};
  std::atomic<int> forks{0};
};

Registry& instance();

// The lock is held across fork(), so that a child never inherits it locked by a thread it lacks.
void before_fork() { instance().mutex.lock(); }
void after_fork_in_parent() { instance().mutex.unlock(); }
void after_fork_in_child() {
  instance().forks.fetch_add(1, std::memory_order_relaxed);
  instance().mutex.unlock();
}

Registry& instance() {
  // Never destroyed: communicators may leave at any point of the interpreter's exit.
  static Registry* const registry = [] {
    auto* made = new Registry;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return made;
  }();
  return *registry;
}

std::atomic<int>* device_count(const c10::Device& device) {
  if (!device.is_cuda() || device.index() < 0 || device.index() >= kMaxDevices) return nullptr;
  return &instance().on_device[static_cast<size_t>(device.index())];
}

std::string known_names() {
  std::vector<std::string> names;
  {
    Registry& r = instance();
    std::lock_guard lock(r.mutex);
    for (const auto& [name, entry] : r.entries) names.push_back('"' + name + '"');
  }
  std::sort(names.begin(), names.end());
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : ", ") + name;
  return joined.empty() ? "none" : joined;
}

}  // namespace

void enter(const std::shared_ptr<Communicator>& communicator) {
  Registry& r = instance();
  std::lock_guard lock(r.mutex);
  const auto found = r.entries.find(communicator->options().name);
  if (found != r.entries.end()) {
    TORCH_CHECK_VALUE(
        found->second.communicator.expired(), "collx: name: \"", communicator->options().name,
        "\" is taken by a communicator; give another name, or destroy that one first");
    r.entries.erase(found);
  }
  r.entries.emplace(communicator->options().name, Entry{communicator.get(), communicator});
  if (auto* count = device_count(communicator->options().device)) count->fetch_add(1);
}

void leave(const Communicator& communicator) {
  Registry& r = instance();
  std::lock_guard lock(r.mutex);
  const auto found = r.entries.find(communicator.options().name);
  if (found == r.entries.end() || found->second.identity != &communicator) return;
  r.entries.erase(found);
  if (auto* count = device_count(communicator.options().device)) count->fetch_sub(1);
}

std::shared_ptr<Communicator> find(std::string_view name) {
  Registry& r = instance();
  std::lock_guard lock(r.mutex);
  const auto found = r.entries.find(name);
  return found == r.entries.end() ? nullptr : found->second.communicator.lock();
}

std::shared_ptr<Communicator> require(const char* op, std::string_view name) {
  std::shared_ptr<Communicator> communicator = find(name);
  TORCH_CHECK_VALUE(communicator != nullptr, "collx.", op, ": group_name: \"", name,
                    "\" names no communicator of this process; known: ", known_names(),
                    ". collx.init() makes one, destroy() removes it");
  return communicator;
}

int live_on_device(int device_index) {
  if (device_index < 0 || device_index >= kMaxDevices) return 0;
  return instance().on_device[static_cast<size_t>(device_index)].load(std::memory_order_relaxed);
}

int fork_generation() { return instance().forks.load(std::memory_order_relaxed); }

}  // namespace collx::registry
