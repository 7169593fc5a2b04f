// The number of blocks and clusters that a device holds at once, as the driver computes it and as
// trials measure it.
#include <algorithm>
#include <climits>
#include <set>
#include <utility>

#include "../protocol/epoch.h"
#include "../protocol/selection.h"
#include "device.h"
#include "kernels.h"
#include "launch.h"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

namespace collx::cuda {

namespace {

int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  require(cudaGetDevice(&device), "querying the current device");
  require(cudaDeviceGetAttribute(&value, attribute, device), "querying the device's attributes");
  return value;
}

int resident_clusters(Kernel kernel, uint32_t threads, uint32_t size) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {size, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(size);
  config.blockDim = dim3(threads);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  require(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config),
          "querying how many clusters fit the device");
  return clusters;
}

/// The smallest residency over all kernels of fused normalizations.
Residency residency_of_norms(int world, bool simulated, int multiprocessors, bool clusters) {
  Residency least;
  Residency::for_each(least, [](uint32_t, uint32_t, int32_t& held) { held = INT_MAX; });
  std::set<std::pair<int, size_t>> asked;  // kernels with equal needs have equal residency
  for_each_norm_kernel(world, simulated, [&](Kernel kernel) {
    const cudaFuncAttributes needs = attributes_of(kernel);
    if (!asked.insert({needs.numRegs, needs.sharedSizeBytes}).second) return;
    Residency::for_each(least, [&](uint32_t threads, uint32_t size, int32_t& held) {
      int here = 0;
      if (size == 1) {
        here = held_together(kernel, static_cast<int>(threads)) * multiprocessors;
      } else if (clusters) {
        here = resident_clusters(kernel, threads, size);
      }
      held = std::min(held, here);
    });
  });
  return least;
}

/// The number of blocks that copy in bulk and are resident at once. It is 0 on devices that have
/// bulk copies, but less shared memory for a block (compute capability 12.0).
int resident_bulk_blocks(int world, int multiprocessors) {
  int held = INT_MAX;
  for (const KernelFamily& family : {kernels::allreduce_wide, kernels::exchange_wide}) {
    const Kernel kernel = family.find({DType::float32, world, true});
    held = std::min(held, held_together(kernel, static_cast<int>(kLaneBound), kBulkBytes));
  }
  return held * multiprocessors;
}

}  // namespace

int resident_blocks(int world, bool simulated, int threads) {
  int resident = kMaxBlocks;
  for_each_kernel(world, simulated, [&](Kernel kernel) {
    resident = std::min(resident, held_together(kernel, threads));
  });
  return resident * attribute_of_device(cudaDevAttrMultiProcessorCount);
}

DeviceCapacity load_kernels(int world, bool clusters, bool simulated) {
  constexpr int kHopper = 9;
  bool hopper = attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= kHopper;
  for_each_kernel(world, simulated, [&](Kernel kernel) {
    prepare(kernel);
    // A newer device may run code that was compiled for an older one.
    hopper &= attributes_of(kernel).ptxVersion >= 10 * kHopper;
  });
  for (int i = 0; i < static_cast<int>(DType::count); ++i) {  // this kernel waits for no peer
    attributes_of(reduce_local({static_cast<DType>(i), world, false}));
  }
  const int multiprocessors = attribute_of_device(cudaDevAttrMultiProcessorCount);
  DeviceCapacity capacity;
  capacity.blocks = resident_blocks(world, simulated, kFullBlock);
  capacity.capabilities.dependent_launch = hopper;
  capacity.capabilities.multicast = hopper;
  capacity.capabilities.bulk_blocks = hopper ? resident_bulk_blocks(world, multiprocessors) : 0;
  capacity.capabilities.residency =
      residency_of_norms(world, simulated, multiprocessors, clusters && hopper);
  return capacity;
}

namespace {

/// The regions of all ranks, for a trial.
struct Everyone {
  RegionHeader* header[kMaxCudaRanks];
  int32_t rank;
  int32_t world;
};

/// A grid whose blocks stay resident until the grids of all ranks have started completely. `mark`:
/// the bits to set in `unmet` if that does not happen within `limit_ns`.
__global__ void __launch_bounds__(kFullBlock)
    meet(const __grid_constant__ Everyone all, uint32_t number, uint32_t mark, uint64_t limit_ns) {
  if (threadIdx.x == 0) {
    RegionHeader* own = all.header[all.rank];
    if (atomicAdd(&own->started, 1u) + 1 == gridDim.x) {
      own->started = 0;  // every block has added; the next grid starts after this one
      for (int rank = 0; rank < all.world; ++rank) {
        ptx::st_release_sys(&all.header[rank]->met[all.rank], number);
      }
    }
    const uint64_t began = ptx::globaltimer();
    for (int rank = 0; rank < all.world; ++rank) {
      while (!epoch_reached(ptx::ld_acquire_sys(&own->met[rank]), number)) {
        if (ptx::globaltimer() - began < limit_ns) continue;
        atomicOr(&own->unmet, mark);
        rank = all.world;
        break;
      }
    }
  }
  __syncthreads();
}

/// The dynamic shared memory with which a multiprocessor holds as many blocks of the trial as of
/// the kernels that the trial represents.
size_t filling(int blocks_held, int multiprocessors) {
  const int each = std::max(blocks_held / std::max(multiprocessors, 1), 1);
  const int all = attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int reserved = attribute_of_device(cudaDevAttrReservedSharedMemoryPerBlock);
  const int most = attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return static_cast<size_t>(std::clamp(all / each - reserved, 0, most) / 128 * 128);
}

}  // namespace

Residency held_at_once(const CudaView& view, const Residency& wanted, uint32_t number,
                       uint64_t limit_ns, Stream stream) {
  Everyone all{};
  for (int rank = 0; rank < view.world; ++rank) all.header[rank] = view.header(rank);
  all.rank = view.rank;
  all.world = view.world;
  const int multiprocessors = attribute_of_device(cudaDevAttrMultiProcessorCount);
  require(cudaFuncSetAttribute(meet, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin)),
          "preparing the residency trial");
  RegionHeader* own = view.header(view.rank);
  require(cudaMemsetAsync(&own->unmet, 0, sizeof(own->unmet), stream),
          "clearing the result of the residency trial");

  const auto try_one = [&](uint32_t mark, uint32_t threads, uint32_t size, uint32_t count,
                           size_t shared, uint64_t limit) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {size, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(count * size);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = size > 1 ? 1 : 0;
    require(cudaLaunchKernelEx(&config, meet, all, ++number, mark, limit),
            "launching the residency trial");
  };
  // Synchronizes the ranks, which may arrive at different times.
  uint32_t mark = 1;
  try_one(mark, kWarpLanes, 1, 1, 0, view.timeout_ns);
  Residency::for_each(wanted, [&](uint32_t threads, uint32_t size, const int32_t& count) {
    mark *= 2;
    if (count == 0) return void(++number);  // the same on all ranks
    const auto blocks = static_cast<int>(wanted.clusters(threads, 1));
    try_one(mark, threads, size, static_cast<uint32_t>(count), filling(blocks, multiprocessors),
            limit_ns);
  });
  uint32_t unmet = 0;
  require(cudaMemcpyAsync(&unmet, &own->unmet, sizeof(unmet), cudaMemcpyDeviceToHost, stream),
          "reading the result of the residency trial");
  require(cudaStreamSynchronize(stream), "running the residency trial");
  if ((unmet & 1u) != 0) {
    throw std::runtime_error(
        "collx: a rank did not join the trial of how many blocks each device can run at once");
  }
  Residency held = wanted;
  mark = 1;
  Residency::for_each(held, [&](uint32_t, uint32_t, int32_t& count) {
    mark *= 2;
    if ((unmet & mark) != 0) count = 0;
  });
  return held;
}

}  // namespace collx::cuda
