#include "region.h"

#include <c10/util/Exception.h>

#include "../cpu/allreduce.h"
#include "communicator.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/device.h"
#endif

namespace collx {

namespace {

void check_world(c10::DeviceType device, int world_size) {
  const int most = device == c10::DeviceType::CPU ? kMaxCpuRanks : kMaxCudaRanks;
  TORCH_CHECK_VALUE(world_size >= 1 && world_size <= most, "collx: world_size: got ", world_size,
                    "; accepted on ", device, ": 1 to ", most);
}

c10::DeviceType check_device_type(c10::DeviceType type) {
  TORCH_CHECK_VALUE(type == c10::DeviceType::CPU || type == c10::DeviceType::CUDA,
                    "collx: device: got ", type, "; accepted: cpu, cuda");
  return type;
}

constexpr const char* kDependentLaunch = "dependent launch";

std::string clusters_name(uint32_t threads, uint32_t size) {
  return "clusters of " + std::to_string(size) + " x " + std::to_string(threads);
}

Offer offer_of(int blocks, const Capabilities& capabilities) {
  Offer offer{{"blocks", blocks}, {kDependentLaunch, capabilities.dependent_launch ? 1 : 0}};
  Residency::for_each(capabilities.residency,
                      [&](uint32_t threads, uint32_t size, const int32_t& held) {
                        offer[clusters_name(threads, size)] = held;
                      });
  return offer;
}

uint64_t slot_bytes(const SlotArea& area, int stages, int world) {
  return static_cast<uint64_t>(stages) * 2 * static_cast<uint64_t>(world) * area.tiles *
         area.tile_bytes;
}

}  // namespace

std::vector<std::pair<std::string, uint64_t>> region_parts(const std::string& device_type,
                                                           int world_size, uint64_t payload_bytes) {
  const c10::DeviceType type = check_device_type(c10::Device(device_type).type());
  check_world(type, world_size);
  const RegionLayout layout = region_layout(type, world_size, payload_bytes);
  std::vector<std::pair<std::string, uint64_t>> parts = {
      {"header", sizeof(RegionHeader)},
      {"oneshot", slot_bytes(layout.oneshot, 1, world_size)},
      {"oneshot_pairs", slot_bytes(layout.oneshot_pairs, 1, world_size)},
      {"twoshot", slot_bytes(layout.twoshot, 2, world_size)},
      {"twoshot_pairs", slot_bytes(layout.twoshot_pairs, 2, world_size)},
      {"channels", slot_bytes(layout.channels.slots, 1, world_size)},
      {"staging", 2 * layout.staging_bytes},
      {"results", 2 * layout.result_bytes},
  };
  uint64_t counted = 0;
  for (const auto& [name, bytes] : parts) counted += bytes;
  parts.emplace_back("tables", layout.total_bytes - counted);  // epochs, flags, entries, rounding
  parts.emplace_back("total", layout.total_bytes);
  return parts;
}

void initialize_region(uint64_t address, c10::Device device, int world_size,
                       uint64_t payload_bytes) {
  check_world(check_device_type(device.type()), world_size);
  const RegionLayout layout = region_layout(device.type(), world_size, payload_bytes);
  char* region = reinterpret_cast<char*>(address);
  if (device.is_cpu()) {
    cpu::initialize(region, layout);
    return;
  }
#if COLLX_CUDA
  const c10::cuda::CUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  cuda::initialize(region, layout, world_size, stream.stream());
  stream.synchronize();
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "collx: device: got ", device,
                              "; this build has no CUDA kernels");
#endif
}

Offer load_kernels(c10::Device device, [[maybe_unused]] bool clusters) {
  if (check_device_type(device.type()) == c10::DeviceType::CPU) return offer_of(1, Capabilities{});
#if COLLX_CUDA
  const c10::cuda::CUDAGuard guard(device);
  const cuda::Offer offer = cuda::load_kernels(clusters);
  return offer_of(offer.blocks, offer.capabilities);
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "collx: device: got ", device,
                              "; this build has no CUDA kernels");
#endif
}

Capabilities capabilities_of(const Offer& agreed) {
  Capabilities capabilities;
  capabilities.dependent_launch = agreed.at(kDependentLaunch) != 0;
  Residency::for_each(capabilities.residency, [&](uint32_t threads, uint32_t size, int32_t& held) {
    held = agreed.at(clusters_name(threads, size));
  });
  return capabilities;
}

}  // namespace collx
