// Functions for a communicator's device other than the collectives.
#include <array>
#include <chrono>
#include <thread>

#include "../protocol/blame.h"
#include "device.h"
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

HostStatus* allocate_status() {
  void* status = nullptr;
  require(cudaHostAlloc(&status, sizeof(HostStatus), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating the status record");
  return new (status) HostStatus{};
}

namespace {

/// In another mode, the copies would fail while any thread captures a graph, and end the capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// A separate stream for copies between host and region, so that they wait for no kernel.
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
  const RelaxedCapture relaxed_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

void report(const CudaView& view, const StatusRecord& record) {
  if (view.region[0] != nullptr) {  // else there is only the fallback: peers have no region to read
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

Verdict end_of_chain(const CudaView& view, bool wait) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(grace_ns(view.timeout_ns));
  CopyStream stream;
  const RegionHeader& own = *view.header(view.rank);
  uint32_t poison = 0;
  stream.read(poison, own.poison);
  if (poison == 0) return {*recorded(*view.status), wait};  // the failure did not reach the region
  const int first = static_cast<int>(poison) - 1;
  std::array<Note, kMaxRanks> inbox;
  uint32_t left = 1u << first;
  for (bool over = false;; over = !wait || Clock::now() >= deadline) {
    stream.read(inbox, reinterpret_cast<const decltype(inbox)&>(own.inbox));
    const Verdict verdict = judge(inbox.data(), left, 0, first, view.world);
    if (verdict.final || over) return {verdict.record, verdict.final || wait};
    // The copy is not atomic: a note that it shows as left is complete only in the next copy.
    for (int rank = 0; rank < view.world; ++rank) left |= (inbox[rank].left & 1u) << rank;
    if (wait) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Progress progress_of(const CudaView& view, int rank) {
  CopyStream stream;
  const auto read = [&]<typename T>(T value, uint64_t offset) {
    stream.read(value, *reinterpret_cast<const T*>(view.region[rank] + offset));
    return value;
  };
  const CudaLayout& layout = view.layout;
  const uint64_t own_flag = kBarrierFlags + static_cast<uint64_t>(rank) * sizeof(uint64_t);
  uint64_t before = 0, after = 0;
  stream.read(before, view.header(rank)->sequence);
  // Block 0 of every kernel sets one of these while it runs: the mark of the first tile, the mark
  // of the first lane, or its own barrier flag, which is ahead of its counter until the kernel
  // ends.
  const bool in_call = read(TileEntry{}, layout.oneshot.entries).busy != 0 ||
                       read(TileEntry{}, layout.twoshot.entries).busy != 0 ||
                       read(TileEntry{}, layout.channels.slots.entries).busy != 0 ||
                       read(uint32_t{}, layout.lanes.busy) != 0 ||
                       read(uint64_t{}, own_flag) >> 32 != read(uint32_t{}, kBarrierEpochs);
  stream.read(after, view.header(rank)->sequence);
  return {after, in_call && after == before};
}

}  // namespace collx::cuda
