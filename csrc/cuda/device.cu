// What a communicator needs of its device besides the collectives.
#include <algorithm>

#include "../protocol/selection.h"
#include "device.h"
#include "launch.h"

namespace collx::cuda {
namespace {

/// Fills one parity of every stage of an area.
void fill(char* region, const SlotArea& area, int world, int stages, int parity, int byte,
          Stream stream) {
  const uint64_t bytes = static_cast<uint64_t>(world) * area.tiles * area.tile_bytes;
  for (int stage = 0; stage < stages; ++stage) {
    require(cudaMemsetAsync(region + area.slot(world, stage, parity, 0), byte, bytes, stream),
            "arming the slots");
  }
}

}  // namespace

void initialise(char* region, const RegionLayout& layout, int world, Stream stream) {
  require(cudaMemsetAsync(region, 0, layout.total_bytes, stream), "clearing the region");
  const auto arm = [&](const SlotArea& area, int stages, bool pairs) {
    fill(region, area, world, stages, 0, 0xFF, stream);
    // Pairs of odd epochs start from zero, an even one: see PairSlots.
    if (!pairs) fill(region, area, world, stages, 1, 0xFF, stream);
  };
  arm(layout.oneshot, 1, false);
  arm(layout.twoshot, 2, false);
  arm(layout.oneshot_pairs, 1, true);
  arm(layout.twoshot_pairs, 2, true);
  arm(layout.channels.slots, 1, false);
}

int load_kernels() {
  // Asking for its occupancy loads a kernel: later, loading could synchronise with the device while
  // another kernel spins there.
  const int resident = resident_blocks(kFullBlock);
  load_local_kernels();
  return resident;
}

int resident_blocks(int threads) {
  int resident = kMaxBlocks;
  for_each_kernel([&](Kernel kernel) {
    int blocks = 0;
    require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0),
            "asking for a kernel's occupancy");
    resident = std::min(resident, blocks);
  });
  int device = 0, multiprocessors = 0;
  require(cudaGetDevice(&device), "asking for the device");
  require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "asking for the multiprocessors");
  return resident * multiprocessors;
}

HostStatus* allocate_status() {
  void* status = nullptr;
  require(cudaHostAlloc(&status, sizeof(HostStatus), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating the status record");
  return new (status) HostStatus{};
}

void free_status(HostStatus* status) { cudaFreeHost(status); }

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

void record_here(HostStatus& status, const StatusRecord& record) {
  // A kernel that has found the same failure meanwhile keeps the word.
  if (__atomic_load_n(&status.ready, __ATOMIC_ACQUIRE) != 0) return;
  status.record = record;
  __atomic_store_n(&status.ready, 1u, __ATOMIC_RELEASE);
}

}  // namespace

void report(const RankView& view, const StatusRecord& record) {
  record_here(*view.status, record);
  if (view.region[0] == nullptr) return;  // fallback only: nothing that peers could look at
  CopyStream stream;
  for (int peer = 0; peer < view.world; ++peer) {
    RegionHeader* header = view.header(peer);
    stream.write(header->inbox[view.rank], record);
    stream.write(header->poison, static_cast<uint32_t>(view.rank) + 1);
  }
}

void adopt_reported(const RankView& view) {
  CopyStream stream;
  uint32_t poison = 0;
  stream.read(poison, view.header(view.rank)->poison);
  if (poison == 0) return;
  StatusRecord record;
  stream.read(record, view.header(view.rank)->inbox[poison - 1]);
  record_here(*view.status, record);
}

}  // namespace collx::cuda
