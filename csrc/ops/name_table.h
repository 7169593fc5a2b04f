// Maps names to objects, and counts the live objects on each device. This header does not depend on
// Torch. Threads that share a table must lock it; live() needs no lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace collx {

template <typename T>
class NameTable {
 public:
  static constexpr int kMaxDevices = 64;

  /// Returns false if the name is taken. `device`: -1 for an object that is not counted.
  bool enter(const std::string& name, const std::shared_ptr<T>& object, int device) {
    const auto found = entries_.find(name);
    if (found != entries_.end()) {
      if (!found->second.object.expired()) return false;
      erase(found);  // its destructor will call leave(), which then finds a different object
    }
    if (device < 0 || device >= kMaxDevices) device = -1;
    entries_.emplace(name, Entry{object.get(), object, device});
    if (device >= 0) on_device_[static_cast<size_t>(device)].fetch_add(1);
    return true;
  }

  /// Removes the entry if it still belongs to this object.
  void leave(std::string_view name, const T* object) {
    const auto found = entries_.find(name);
    if (found != entries_.end() && found->second.identity == object) erase(found);
  }

  /// Returns null if there is none.
  std::shared_ptr<T> find(std::string_view name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : found->second.object.lock();
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, entry] : entries_) names.push_back(name);
    return names;
  }

  int live(int device) const {
    if (device < 0 || device >= kMaxDevices) return 0;
    return on_device_[static_cast<size_t>(device)].load(std::memory_order_relaxed);
  }

 private:
  struct Hash {
    using is_transparent = void;  // lookups by string_view do not create a std::string
    size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
  };
  struct Entry {
    const T* identity;
    std::weak_ptr<T> object;  // an entry does not keep its object alive
    int device;
  };
  using Entries = std::unordered_map<std::string, Entry, Hash, std::equal_to<>>;

  void erase(typename Entries::iterator entry) {
    const int device = entry->second.device;
    if (device >= 0) on_device_[static_cast<size_t>(device)].fetch_sub(1);
    entries_.erase(entry);
  }

  Entries entries_;
  std::array<std::atomic<int>, kMaxDevices> on_device_{};
};

}  // namespace collx
