// A symmetric-memory allocator for the CPU from another package. It allocates nothing.
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

namespace {

namespace symm_mem = c10d::symmetric_memory;

class Other final : public symm_mem::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t, int, const std::optional<std::string>&) override { return nullptr; }
  void free(void*) override {}
  size_t get_alloc_size(void*) override { return 0; }
  c10::intrusive_ptr<symm_mem::SymmetricMemory> rendezvous(
      void*, const std::optional<std::string>&) override {
    return nullptr;
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::DeviceType::CPU; }
  std::string name() override { return "OTHER"; }
};

const bool registered = [] {
  symm_mem::register_allocator(c10::DeviceType::CPU, c10::make_intrusive<Other>());
  return true;
}();

}  // namespace
