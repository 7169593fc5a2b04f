// Functions for a communicator's device other than the collectives. This header includes neither
// Torch nor CUDA headers, so that ops/ can be built without nvcc.
#pragma once

#include "../protocol/blame.h"
#include "../protocol/call.h"
#include "../protocol/progress.h"
#include "../protocol/selection.h"

struct CUstream_st;

namespace collx::cuda {

using Stream = CUstream_st*;

/// Zeroes the header and the tables and arms the slots, in stream order. Peers may use the region
/// after the stream has been synchronized and all ranks have passed a barrier.
void initialize(char* region, const CudaLayout& layout, int world, Stream stream);

struct DeviceCapacity {
  int blocks;  // of kFullBlock threads; resident at once, for any kernel
  Capabilities capabilities;
};

/// Loads every kernel for a world of that size, and returns the capabilities of the current device.
/// `clusters`: if false, the device is treated as if it did not support clusters. `simulated`: see
/// CudaView.
DeviceCapacity load_kernels(int world, bool clusters, bool simulated);

/// The number of trial numbers that a call of held_at_once uses.
inline constexpr uint32_t kTrials = 32;

/// Tests whether the devices of all ranks hold the wanted numbers of clusters at the same time.
/// Returns `wanted`, with 0 for the numbers that they did not hold. Collective: all ranks call it
/// with equal arguments. The driver's answer is only valid for a device that no other process uses:
/// processes that share a device by CUDA's multi-process service take resources from each other.
/// `number`: kTrials more in each call. `limit_ns`: the limit of one trial. Throws
/// std::runtime_error if a rank does not call it within view.timeout_ns.
Residency held_at_once(const CudaView& view, const Residency& wanted, uint32_t number,
                       uint64_t limit_ns, Stream stream);

/// The number of blocks with that many threads that the current device holds resident at once, for
/// every kernel of such a world.
int resident_blocks(int world, bool simulated, int threads);

/// Host memory that kernels can write and the host can read while they run.
HostStatus* allocate_status();

/// Records a failure that the host has noticed (in the fallback's waits) on this rank and at the
/// peers, without waiting for this device's streams.
void report(const CudaView& view, const StatusRecord& record);

/// Copies into view.status a failure that a peer reported while no kernel of this rank could see
/// it. The copy engine reads the region, so this waits for no kernel.
void adopt_reported(const CudaView& view);

/// The result of a failed wait, from the notes of all ranks (protocol/blame.h). The copy engine
/// reads the region. `wait`: wait until the notes determine the result or all ranks have had enough
/// time to leave them, so that the result is final. Otherwise the result reflects only the current
/// notes.
Verdict end_of_chain(const CudaView& view, bool wait);

/// The progress of a rank's kernels, including replays of graphs. The copy engine reads the region.
Progress progress_of(const CudaView& view, int rank);

}  // namespace collx::cuda
