#include "registry.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "communicator.h"
#include "name_table.h"
#include "posting.h"
#include "process_wide.h"

namespace collx::registry {

namespace {

std::atomic<int> forks{0};
std::atomic<uint64_t> changes{1};  // of the table of names

struct Registry {
  std::mutex mutex;
  // Regions belong to Python objects, so nothing here may outlive those.
  NameTable<Communicator> table;

  Registry* in_child() {
    forks.fetch_add(1, std::memory_order_relaxed);
    mutex.unlock();
    return this;
  }
};

/// A result of a lookup of this thread, since successive calls mostly use the same communicator.
struct Last {
  uint64_t changes = 0;
  std::string name;
  std::weak_ptr<Communicator> found;
};

std::atomic<Factory> chosen_factory{nullptr};
std::atomic<Lookup> chosen_lookup{nullptr};

Registry& instance() { return process_wide<Registry>(); }
[[maybe_unused]] const Registry& made_at_load = instance();

int counted_on(const c10::Device& device) { return device.is_cuda() ? device.index() : -1; }

std::string known_names() {
  std::vector<std::string> names;
  {
    std::lock_guard lock(instance().mutex);
    names = instance().table.names();
  }
  std::sort(names.begin(), names.end());
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "\"" : ", \"") + name + '"';
  return joined.empty() ? "none" : joined;
}

}  // namespace

void enter(const std::shared_ptr<Communicator>& communicator) {
  const CommunicatorOptions& o = communicator->options();
  std::lock_guard lock(instance().mutex);
  TORCH_CHECK_VALUE(instance().table.enter(o.name, communicator, counted_on(o.device)),
                    "collx: name: \"", o.name,
                    "\" is the name of an existing communicator; destroy it, or pass another name");
  changes.fetch_add(1, std::memory_order_release);
}

void leave(const Communicator& communicator) {
  std::lock_guard lock(instance().mutex);
  instance().table.leave(communicator.options().name, &communicator);
  changes.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<Communicator> find(std::string_view name) {
  std::lock_guard lock(instance().mutex);
  return instance().table.find(name);
}

std::shared_ptr<Communicator> look_up(std::string_view name, std::optional<c10::Device> device) {
  // Results for any device, for the CPU and for CUDA.
  thread_local std::array<Last, 3> results;
  Last& last = results[!device ? 0 : device->is_cuda() ? 2 : 1];
  // Read first: a change during the lookup makes the result outdated.
  const uint64_t now = changes.load(std::memory_order_acquire);
  if (last.changes == now && last.name == name) {
    if (std::shared_ptr<Communicator> found = last.found.lock()) return found;
  }
  std::shared_ptr<Communicator> found = find(name);
  const Lookup lookup = chosen_lookup.load(std::memory_order_acquire);
  if (found == nullptr && lookup != nullptr) {
    const NotPosting for_the_calls_of_init;
    found = lookup(std::string(name), device);
  }
  last = {now, std::string(name), found};
  return found;
}

std::shared_ptr<Communicator> require(const char* op, std::string_view name,
                                      std::optional<c10::Device> device) {
  const std::shared_ptr<Communicator> communicator = look_up(name, device);
  TORCH_CHECK_VALUE(communicator != nullptr, "collx.", op,
                    ": group_name: this process has no communicator \"", name,
                    "\"; existing: ", known_names(),
                    ". collx.init creates communicators, and destroy removes them");
  return communicator;
}

void make_by(Factory factory) { chosen_factory.store(factory, std::memory_order_release); }

void look_up_by(Lookup lookup) { chosen_lookup.store(lookup, std::memory_order_release); }

std::shared_ptr<Communicator> make(const std::string& group_name) {
  const Factory factory = chosen_factory.load(std::memory_order_acquire);
  TORCH_CHECK(factory != nullptr, "collx: a communicator for process group \"", group_name,
              "\" cannot be created, since no factory is registered; import collx in Python first");
  return factory(group_name);
}

int live_on_device(int device_index) { return instance().table.live(device_index); }

int fork_generation() { return forks.load(std::memory_order_relaxed); }

}  // namespace collx::registry
