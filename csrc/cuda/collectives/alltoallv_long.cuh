// The long messages of an alltoallv between two ranks with splits in device memory, by chunks in
// lanes, and the part that stays on this rank. alltoallv_device_splits.cuh has exchanged the counts
// before. If neither message is long, it has done all of this itself.
#pragma once

#include "../transports/chunks.cuh"
#include "device_rows.cuh"

namespace collx::cuda {

/// The second kernel of a call. The first kernel has already counted the call.
class LongLanes : public Lanes<2, 1> {
 public:
  using Lanes<2, 1>::Lanes;
  static constexpr bool kCounts = false;
};

__global__ void __launch_bounds__(kLaneBound, 2)
    alltoallv_long_kernel(const __grid_constant__ KernelCall call,
                          const __grid_constant__ Routes tensors,
                          const __grid_constant__ DeviceSplits given,
                          const __grid_constant__ LaneArguments prepared) {
  ptx::griddepcontrol_wait();
  const int rank = call.rank, peer = 1 - rank;
  const auto message = [&](const Message& tensor, const int64_t* rows, int of) {
    const uint64_t start = of == 0 ? 0 : static_cast<uint64_t>(rows[0]);
    return rows_of(tensor, given.row_bytes, start, static_cast<uint64_t>(rows[of]));
  };
  const Message& input = tensors.from[0];
  const Message& output = tensors.to[0];
  const Message from = message(input, given.sent, peer), to = message(output, given.received, peer);
  const bool sends = is_long(from.wire, call.capacity), takes = is_long(to.wire, call.capacity);
  if (!sends && !takes) return;

  __shared__ LaneArguments lanes;
  if (threadIdx.x == 0) lanes = prepared;
  __syncthreads();
  Session<LongLanes> session(call, lanes);
  LongLanes& transport = session.transport;
  const Message own = message(input, given.sent, rank);
  const Message kept = message(output, given.received, rank);
  const uint64_t arrived = static_cast<uint64_t>(given.received[0] + given.received[1]);
  const Message cleared = rows_of(output, given.row_bytes, arrived, given.capacity - arrived);
  // If the call has failed, the counts may have any value.
  const bool works = __syncthreads_and(session.alive()) != 0;
  if (threadIdx.x == 0) {
    const auto chunks_of = [&](const Message& m, bool is) {
      return LaneChunks(is ? Run<>(m).vectors() : 0, static_cast<int>(gridDim.x),
                        prepared.area.slot_bytes / kVectorBytes);
    };
    lanes.sent[0] = chunks_of(cleared, works);
    lanes.received[0] = chunks_of(kept, works);
    lanes.sent[1] = chunks_of(from, works && sends);
    lanes.received[1] = chunks_of(to, works && takes);
  }
  __syncthreads();

  const auto send = [&](const RoleThreads& role, uint32_t i, auto ready, auto slot) {
    const Run<> run(from);
    bool asked = false;
    return send_chunk(role, run, transport.chunk(lanes.sent[1], i, run.vectors()), slot(1), ready,
                      asked);
  };
  const auto take = [&](const RoleThreads& role, uint32_t i, auto ready, auto slot, auto) {
    if (!ready()) return false;
    const Run<> run(to);
    take_chunk(role, run, transport.chunk(lanes.received[1], i, run.vectors()), slot(1));
    return true;
  };
  const auto keep = [&](const RoleThreads& role) {
    copy_chunks(role, transport, lanes.received[0], Run<>(own), Run<>(kept));
    clear_chunks(role, transport, lanes.sent[0], Run<>(cleared));
  };
  transport.run(session.patience, send, take, keep);
}

}  // namespace collx::cuda
