// What a communicator needs of its device besides the collectives.
#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <set>
#include <thread>
#include <utility>

#include "../protocol/blame.h"
#include "../protocol/selection.h"
#include "device.h"
#include "kernels.h"
#include "launch.h"

namespace collx::cuda {

void initialize(char* region, const CudaLayout& layout, int world, Stream stream) {
  require(cudaMemsetAsync(region, 0, layout.total_bytes, stream), "clearing the region");
  const auto arm = [&](const SlotArea& area, int stages) {
    const uint64_t bytes = uint64_t{area.source_bytes} * static_cast<uint64_t>(2 * stages * world);
    require(cudaMemsetAsync(region + area.slots, 0xFF, bytes, stream), "arming the slots");
  };
  arm(layout.oneshot, 1);
  arm(layout.twoshot, 2);
  arm(layout.channels.slots, 1);
}

namespace {

int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  require(cudaGetDevice(&device), "asking for the device");
  require(cudaDeviceGetAttribute(&value, attribute, device), "asking for the device's attributes");
  return value;
}

cudaFuncAttributes attributes_of(Kernel kernel) {
  cudaFuncAttributes attributes{};
  require(cudaFuncGetAttributes(&attributes, kernel), "asking for a kernel's attributes");
  return attributes;
}

/// Blocks of a kernel on one multiprocessor. Asking loads it: later, loading could synchronize with
/// the device while another kernel spins there.
int held_together(Kernel kernel, uint32_t threads) {
  int blocks = 0;
  require(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads), 0),
      "loading the kernels");
  return blocks;
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
          "asking for the clusters that the device holds");
  return clusters;
}

/// Of all fused normalizations the smallest.
Residency residency_of_norms(int world, int multiprocessors, bool clusters) {
  Residency least;
  Residency::for_each(least, [](uint32_t, uint32_t, int32_t& held) { held = INT_MAX; });
  std::set<std::pair<int, size_t>> asked;  // kernels that need the same are held alike
  for_each_norm_kernel(world, [&](Kernel kernel) {
    const cudaFuncAttributes needs = attributes_of(kernel);
    if (!asked.insert({needs.numRegs, needs.sharedSizeBytes}).second) return;
    Residency::for_each(least, [&](uint32_t threads, uint32_t size, int32_t& held) {
      int here = 0;
      if (size == 1) {
        here = held_together(kernel, threads) * multiprocessors;
      } else if (clusters) {
        here = resident_clusters(kernel, threads, size);
      }
      held = std::min(held, here);
    });
  });
  return least;
}

}  // namespace

int resident_blocks(int world, int threads) {
  int resident = kMaxBlocks;
  for_each_kernel(world, [&](Kernel kernel) {
    resident = std::min(resident, held_together(kernel, static_cast<uint32_t>(threads)));
  });
  return resident * attribute_of_device(cudaDevAttrMultiProcessorCount);
}

Offer load_kernels(int world, bool clusters) {
  constexpr int kHopper = 9;
  bool hopper = attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= kHopper;
  for_each_kernel(world, [&](Kernel kernel) {
    // A newer device may run code that was made for an older one.
    hopper &= attributes_of(kernel).ptxVersion >= 10 * kHopper;
  });
  for (int i = 0; i < static_cast<int>(DType::count); ++i) {  // which waits for nobody
    attributes_of(reduce_local({static_cast<DType>(i), world, false}));
  }
  const int multiprocessors = attribute_of_device(cudaDevAttrMultiProcessorCount);
  Offer offer;
  offer.blocks = resident_blocks(world, kFullBlock);
  offer.capabilities.dependent_launch = hopper;
  offer.capabilities.multicast = hopper;
  offer.capabilities.residency = residency_of_norms(world, multiprocessors, clusters && hopper);
  return offer;
}

HostStatus* allocate_status() {
  void* status = nullptr;
  require(cudaHostAlloc(&status, sizeof(HostStatus), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating the status record");
  return new (status) HostStatus{};
}

namespace {

/// A stream of its own for copies between host and region, which so wait for no kernel.
class CopyStream {
 public:
  CopyStream() {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~CopyStream() { cudaStreamDestroy(stream_); }
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  template <typename T>
  void read(T& to, const T& from) {
    require(cudaMemcpyAsync(&to, &from, sizeof(T), cudaMemcpyDeviceToHost, stream_),
            "reading the region");
    require(cudaStreamSynchronize(stream_), "reading the region");
  }
  template <typename T>
  void write(T& to, const T& from) {
    require(cudaMemcpyAsync(&to, &from, sizeof(T), cudaMemcpyHostToDevice, stream_),
            "telling the peers");
    require(cudaStreamSynchronize(stream_), "telling the peers");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

void report(const CudaView& view, const StatusRecord& record) {
  if (view.region[0] != nullptr) {  // else the fallback only: nothing that peers could look at
    CopyStream stream;
    uint32_t poison = 0;
    stream.read(poison, view.header(view.rank)->poison);
    for (int peer = 0; peer < view.world; ++peer) {
      Note& note = view.header(peer)->inbox[view.rank];
      stream.write(note.record, record);
      stream.write(note.left, 1u);
    }
    for (int peer = 0; poison == 0 && peer < view.world; ++peer) {
      stream.write(view.header(peer)->poison, static_cast<uint32_t>(view.rank) + 1);
    }
  }
  record_first(*view.status, record);
}

void adopt_reported(const CudaView& view) {
  CopyStream stream;
  uint32_t poison = 0;
  stream.read(poison, view.header(view.rank)->poison);
  if (poison == 0) return;
  StatusRecord record;
  stream.read(record, view.header(view.rank)->inbox[poison - 1].record);
  record_first(*view.status, record);
}

StatusRecord end_of_chain(const CudaView& view) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(grace_ns(view.timeout_ns));
  CopyStream stream;
  const RegionHeader& own = *view.header(view.rank);
  uint32_t poison = 0;
  stream.read(poison, own.poison);
  if (poison == 0) return view.status->record;  // it did not reach the region
  const int first = static_cast<int>(poison) - 1;
  std::array<Note, kMaxRanks> inbox;
  uint32_t left = 1u << first;
  for (bool over = false;; over = Clock::now() >= deadline) {
    stream.read(inbox, reinterpret_cast<const decltype(inbox)&>(own.inbox));
    const Verdict verdict = judge(inbox.data(), left, 0, first, view.world);
    if (verdict.final || over) return verdict.record;
    // A copy is not made at one moment: a note that it shows as left is whole in the next one.
    for (int rank = 0; rank < view.world; ++rank) left |= (inbox[rank].left & 1u) << rank;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace collx::cuda
