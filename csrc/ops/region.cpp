#include "region.h"

#include <c10/util/Exception.h>

#include "../cpu/calls.h"
#include "communicator.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/device.h"
#endif

namespace collx {

namespace {

constexpr const char* kDependentLaunch = "dependent launch";
constexpr const char* kMulticast = "multicast";
constexpr const char* kBulkBlocks = "bulk blocks";

std::string clusters_name(uint32_t threads, uint32_t size) {
  return "clusters of " + std::to_string(size) + " x " + std::to_string(threads);
}

Offer clusters_of(const Residency& residency) {
  Offer offer;
  Residency::for_each(residency, [&](uint32_t threads, uint32_t size, const int32_t& held) {
    offer[clusters_name(threads, size)] = held;
  });
  return offer;
}

Residency residency_of(const Offer& offer) {
  Residency residency;
  Residency::for_each(residency, [&](uint32_t threads, uint32_t size, int32_t& held) {
    held = offer.at(clusters_name(threads, size));
  });
  return residency;
}

Offer offer_of(int blocks, const Capabilities& capabilities) {
  Offer offer = clusters_of(capabilities.residency);
  offer["blocks"] = blocks;
  offer[kDependentLaunch] = capabilities.dependent_launch ? 1 : 0;
  offer[kMulticast] = capabilities.multicast ? 1 : 0;
  offer[kBulkBlocks] = capabilities.bulk_blocks;
  return offer;
}

using Parts = std::vector<std::pair<std::string, uint64_t>>;

/// Adds the remaining bytes: epochs, flags, entries, and rounding.
Parts with_tables(Parts parts, uint64_t total) {
  uint64_t counted = 0;
  for (const auto& [name, bytes] : parts) counted += bytes;
  parts.emplace_back("tables", total - counted);
  parts.emplace_back("total", total);
  return parts;
}

/// Bytes of slots, which exist twice: one for each parity of the use.
uint64_t slots_of(int stages, int world, uint64_t bytes) {
  return static_cast<uint64_t>(stages) * 2 * static_cast<uint64_t>(world) * bytes;
}

Parts parts_of(const CpuLayout& layout, int world) {
  return with_tables({{"header", sizeof(RegionHeader)},
                      {"oneshot", slots_of(1, world, layout.oneshot.slot_bytes)},
                      {"twoshot", slots_of(2, world, layout.twoshot.slot_bytes)},
                      {"staging", 2 * layout.staging_bytes},
                      {"results", 2 * layout.result_bytes}},
                     layout.total_bytes);
}

Parts parts_of(const CudaLayout& layout, int world) {
  const auto slots = [&](int stages, const SlotArea& area) {
    return slots_of(stages, world, area.source_bytes);
  };
  const auto peers = static_cast<uint64_t>(world - 1);
  return with_tables(
      {{"header", sizeof(RegionHeader)},
       {"oneshot", slots(1, layout.oneshot)},
       {"twoshot", slots(2, layout.twoshot)},
       {"channels", slots(1, layout.channels.slots)},
       {"lane_tables", layout.lanes.lanes * kLaneTableBytes},
       {"lanes", kLaneStages * layout.lanes.lanes * peers * kRingSlots * layout.lanes.slot_bytes},
       {"staging", 2 * layout.staging_bytes},
       {"results", 2 * layout.result_bytes}},
      layout.total_bytes);
}

}  // namespace

std::vector<std::pair<std::string, uint64_t>> region_parts(const std::string& device_type,
                                                           int world_size, uint64_t payload_bytes) {
  const c10::DeviceType type = c10::Device(device_type).type();
  TORCH_CHECK_VALUE(type == c10::DeviceType::CPU || type == c10::DeviceType::CUDA,
                    "collx: device: got ", type, "; accepted: cpu, cuda");
  check_world(type, world_size);
  return type == c10::DeviceType::CPU
             ? parts_of(require_cpu_layout(world_size, payload_bytes), world_size)
             : parts_of(require_cuda_layout(world_size, payload_bytes), world_size);
}

void initialize_region(uint64_t address, c10::Device device, int world_size,
                       uint64_t payload_bytes) {
  check_device(device);
  check_world(device.type(), world_size);
  char* region = reinterpret_cast<char*>(address);
#if COLLX_CUDA
  if (device.is_cuda()) {
    const CudaLayout layout = require_cuda_layout(world_size, payload_bytes);
    const c10::cuda::CUDAGuard guard(device);
    const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
    cuda::initialize(region, layout, world_size, stream.stream());
    return stream.synchronize();
  }
#endif
  cpu::initialize(region, require_cpu_layout(world_size, payload_bytes));
}

Offer load_kernels(c10::Device device, [[maybe_unused]] int world_size,
                   [[maybe_unused]] bool clusters, [[maybe_unused]] bool simulated) {
  check_device(device);
#if COLLX_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    const cuda::DeviceCapacity found = cuda::load_kernels(world_size, clusters, simulated);
    return offer_of(found.blocks, found.capabilities);
  }
#endif
  return offer_of(1, Capabilities{});
}

Offer held_at_once(const Offer& wanted, [[maybe_unused]] const std::vector<uint64_t>& regions,
                   c10::Device device, [[maybe_unused]] int rank, [[maybe_unused]] uint32_t number,
                   [[maybe_unused]] int64_t limit_ms, [[maybe_unused]] int64_t timeout_ms) {
  const Residency residency = residency_of(wanted);
  check_device(device);
#if COLLX_CUDA
  if (device.is_cuda()) {
    CudaView view{};
    view.rank = rank;
    view.world = static_cast<int32_t>(regions.size());
    check_world(device.type(), view.world);
    for (size_t i = 0; i < regions.size(); ++i) {
      view.region[i] = reinterpret_cast<char*>(regions[i]);
    }
    constexpr uint64_t kMillisecond = 1'000'000;
    view.timeout_ns = static_cast<uint64_t>(timeout_ms) * kMillisecond;
    const c10::cuda::CUDAGuard guard(device);
    const auto stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
    return clusters_of(cuda::held_at_once(view, residency, number,
                                          static_cast<uint64_t>(limit_ms) * kMillisecond, stream));
  }
#endif
  return clusters_of(residency);
}

Capabilities capabilities_of(const Offer& agreed) {
  Capabilities capabilities;
  capabilities.dependent_launch = agreed.at(kDependentLaunch) != 0;
  capabilities.bulk_blocks = agreed.at(kBulkBlocks);
  capabilities.residency = residency_of(agreed);
  return capabilities;
}

}  // namespace collx
