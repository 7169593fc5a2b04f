// What a communicator needs of its device besides the collectives. No Torch here, and no CUDA
// header either, so that ops/ can be built without nvcc.
#pragma once

#include "../protocol/blame.h"
#include "../protocol/call.h"
#include "../protocol/progress.h"
#include "../protocol/selection.h"

struct CUstream_st;

namespace collx::cuda {

using Stream = CUstream_st*;

/// Zeroes header and tables and arms the slots, in stream order. Peers may use the
/// region after the stream has been synchronized and a barrier passed.
void initialize(char* region, const CudaLayout& layout, int world, Stream stream);

struct DeviceCapacity {
  int blocks;  // of kFullBlock threads, of any kernel, that the device holds resident at once
  Capabilities capabilities;
};

/// Loads every kernel of a world of that size, and says what the current device can do with them.
/// `clusters`: false: as if it had none. `simulated`: see CudaView.
DeviceCapacity load_kernels(int world, bool clusters, bool simulated);

/// Numbers that a call of held_at_once takes.
inline constexpr uint32_t kTrials = 32;

/// Whether the devices of all ranks hold so many clusters at the same time: of what is `wanted`,
/// the numbers that they held, and 0 for the others. Collective: ranks call with equal arguments.
/// What the driver computes holds for a device of one's own alone: processes that share one by
/// CUDA's multi-process service take each other's places. `number`: kTrials more in each call.
/// `limit_ns`: of a trial. std::runtime_error if a rank does not call within view.timeout_ns.
Residency held_at_once(const CudaView& view, const Residency& wanted, uint32_t number,
                       uint64_t limit_ns, Stream stream);

/// How many blocks of so many threads the current device holds resident at once, of every kernel
/// of such a world.
int resident_blocks(int world, bool simulated, int threads);

/// Host memory that kernels can write and the host can read while they run.
HostStatus* allocate_status();

/// Records a failure that the host noticed (the fallback's waits) here and at the peers, without
/// waiting for this device's streams.
void report(const CudaView& view, const StatusRecord& record);

/// Takes over into view.status what a peer has reported while no kernel of this rank was there to
/// see it. Reads the region by the copy engine: waits for no kernel.
void adopt_reported(const CudaView& view);

/// What a wait in vain comes to, by the notes of all ranks (protocol/blame.h). Reads the region
/// likewise. `wait`: until the notes settle it or ranks have had time enough to leave them, so that
/// the result is final; else only what the notes say now.
Verdict end_of_chain(const CudaView& view, bool wait);

/// How far the kernels of a rank have come, replays of graphs included. Reads its region likewise.
Progress progress_of(const CudaView& view, int rank);

}  // namespace collx::cuda
