#include "cpu_allocator.h"

#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "interpreter_lock.h"
#include "rendezvous.h"
#include "symmetric_memory.h"

namespace collx::memory {
namespace {

namespace symm_mem = c10d::symmetric_memory;
using Handle = c10::intrusive_ptr<symm_mem::SymmetricMemory>;

/// One allocation: its memory, which tensors use until free(), and its mappings in groups.
struct Block {
  std::shared_ptr<const Segment> segment;
  size_t bytes;
  pid_t owner;
  std::optional<std::string> default_group;
  // Strong references for the lifetime of the allocation: whether a rendezvous waits for the peers
  // must not depend on when this rank's handles were garbage-collected.
  std::map<std::string, std::shared_ptr<RankMappings>> groups;
  std::map<std::pair<std::string, size_t>, Handle> handles;
};

class CpuAllocator final : public symm_mem::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int /*device_idx*/,
              const std::optional<std::string>& group_name) override {
    auto block = std::make_shared<Block>();
    block->segment = std::make_shared<const Segment>(Segment::create(size, "collx buffer"));
    block->bytes = size;
    block->owner = ::getpid();
    block->default_group = group_name;
    std::byte* data = block->segment->data();
    const std::lock_guard lock(mutex_);
    blocks_.emplace(data, std::move(block));
    return data;
  }

  void free(void* ptr) override {
    std::shared_ptr<Block> last;  // unmapped after the lock is released
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<std::byte*>(ptr));
    if (found == blocks_.end()) return;
    last = std::move(found->second);
    blocks_.erase(found);
  }

  size_t get_alloc_size(void* ptr) override {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<std::byte*>(ptr));
    TORCH_CHECK(found != blocks_.end(), "get_alloc_size: ", ptr,
                " is not symmetric memory of the CPU");
    return found->second->bytes;
  }

  /// Returns null if `ptr` is not in a symmetric allocation, as PyTorch expects.
  Handle rendezvous(void* ptr, const std::optional<std::string>& group_name) override {
    const WithoutInterpreterLock unlocked;
    const std::shared_ptr<Block> block = find_covering(ptr);
    if (!block) return nullptr;
    TORCH_CHECK(block->owner == ::getpid(), "rendezvous: this memory was allocated by process ",
                block->owner, " and cannot be used in its forked child ", ::getpid());
    const auto& name = group_name.has_value() ? group_name : block->default_group;
    TORCH_CHECK_VALUE(name.has_value(),
                      "rendezvous: no group was passed, neither here nor to empty()");
    const auto offset = static_cast<size_t>(static_cast<std::byte*>(ptr) - block->segment->data());
    return handle_of(*block, *name, offset);
  }

  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::DeviceType::CPU; }
  std::string name() override { return "COLLX"; }

  std::mutex& mutex() { return mutex_; }

 private:
  std::shared_ptr<Block> find_covering(void* ptr) {
    auto* at = static_cast<std::byte*>(ptr);
    const std::lock_guard lock(mutex_);
    auto next = blocks_.upper_bound(at);
    if (next == blocks_.begin()) return nullptr;
    const auto& [start, block] = *std::prev(next);
    // An empty allocation covers its own address.
    return at == start || static_cast<size_t>(at - start) < block->bytes ? block : nullptr;
  }

  Handle handle_of(Block& block, const std::string& group, size_t offset) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto known = block.handles.find({group, offset}); known != block.handles.end()) {
        return known->second;
      }
      if (const auto met = block.groups.find(group); met != block.groups.end()) {
        return remember(block, group, offset, met->second);
      }
    }
    // Called without the lock, because this waits for the peers.
    auto mappings = memory::rendezvous(group, block.segment, block.bytes, offset);
    const std::lock_guard lock(mutex_);
    block.groups.insert_or_assign(group, mappings);
    return remember(block, group, offset, std::move(mappings));
  }

  static Handle remember(Block& block, const std::string& group, size_t offset,
                         std::shared_ptr<RankMappings> mappings) {
    Handle handle = c10::make_intrusive<CpuSymmetricMemory>(std::move(mappings), offset);
    block.handles.insert_or_assign({group, offset}, handle);
    return handle;
  }

  std::mutex mutex_;
  std::map<std::byte*, std::shared_ptr<Block>> blocks_;  // by first address
};

// Never destroyed: tensors may be freed after static destructors have run.
CpuAllocator* allocator = nullptr;

void register_once(InterpreterLock lock) {
  const auto device = c10::DeviceType::CPU;
  TORCH_CHECK(!symm_mem::has_allocator(device),
              "another package has registered a symmetric memory allocator for the CPU: '",
              symm_mem::get_allocator(device)->name(),
              "'. PyTorch has room for one in a process: use collx on the CPU in a process that "
              "does not register that one");
  interpreter_lock = lock;
  allocator = c10::make_intrusive<CpuAllocator>().release();
  symm_mem::register_allocator(device, c10::intrusive_ptr<CpuAllocator>::reclaim_copy(allocator));
  // The lock is held across fork(), so that a fork during another thread's alloc() does not leave
  // it locked in the child.
  ::pthread_atfork([] { allocator->mutex().lock(); }, [] { allocator->mutex().unlock(); },
                   [] { allocator->mutex().unlock(); });
}

}  // namespace

void register_cpu_allocator(InterpreterLock lock) {
  static std::once_flag once;
  std::call_once(once, register_once, lock);
}

}  // namespace collx::memory
