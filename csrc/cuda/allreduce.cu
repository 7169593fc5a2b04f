// Launchers of all-reduce, and the local reduction of the fallback.
#include <algorithm>

#include "../protocol/uses.h"
#include "calls.h"
#include "collectives/reduce_local.cuh"
#include "launch.h"
#include "transports/lanes.cuh"

namespace collx::cuda {
namespace {

using AllreduceLaunch = Launch<AllreduceCall>;

KernelCall kernel_call_of(const AllreduceLaunch& l) {
  KernelCall k = arguments_of(l.view, l.call);
  k.numel = l.call.numel;
  k.reduce_op = l.call.reduce_op;
  return k;
}

uint64_t bytes_of(const AllreduceCall& call) {
  return call.numel * static_cast<uint64_t>(dtype_size(call.dtype));
}

/// The number of vectors that each rank sends to each other rank in a stage, on the wire.
uint64_t sent_vectors(const AllreduceCall& call, int world) {
  const uint64_t vectors = ceil_div<uint64_t>(bytes_of(call), kVectorBytes);
  const bool parts = row_of(call.plan.algorithm).share == Share::part;
  const bool masked =
      pushes_into_slots(call.plan.algorithm) && is_masked(Collective::allreduce, call.dtype);
  return wire_vectors(masked, parts ? largest_part(vectors, world) : vectors);
}

/// Whether the call is a sum of aligned vectors whose size is a multiple of `unit` bytes.
bool is_whole_sum(const AllreduceCall& call, uint64_t unit) {
  return call.reduce_op == ReduceOp::sum && bytes_of(call) % unit == 0 &&
         whole_vectors(call.input) && whole_vectors(call.output);
}

/// Whether the call is simple: see session.cuh. Ranks may differ in this: it selects the code that
/// runs, not the data that is exchanged.
bool is_simple(const KernelCall& k, const CudaView& view, const AllreduceCall& call) {
  const uint64_t unit = row_of(call.plan.algorithm).share == Share::part
                            ? uint64_t{kVectorBytes} * static_cast<uint32_t>(view.world)
                            : uint64_t{kVectorBytes};
  const uint64_t threads = static_cast<uint64_t>(call.plan.blocks) * call.plan.threads;
  return is_whole_sum(call, unit) && !view.check && call.numel > 0 && k.vectors <= threads &&
         k.vectors <= k.capacity;
}

void push(const AllreduceLaunch& l) {
  KernelCall k = kernel_call_of(l);
  use_slots(k, *slots_of(l.view.layout, row_of(l.call.plan.algorithm).slots), l.view,
            sent_vectors(l.call, l.view.world));
  if (l.view.check) k.fingerprint = fingerprint(l.call.descriptor);
  l.run(is_simple(k, l.view, l.call), k);
}

/// Results go into the outputs of all ranks if these are symmetric, consist of whole vectors, and
/// need no epilogue.
bool goes_into_outputs(const AllreduceCall& call) {
  return call.peer_output[0] != nullptr && call.epilogue == nullptr && whole_vectors(call.output) &&
         bytes_of(call) % kVectorBytes == 0;
}

/// Launches a call with few blocks, each of which serves several lanes.
void wide_lanes(const AllreduceLaunch& l, KernelCall& k, LaneArguments& lanes, bool direct) {
  const bool whole = l.call.plan.bulk && bytes_of(l.call) % kVectorBytes == 0 &&
                     whole_vectors(l.call.input) && whole_vectors(l.call.output);
  const bool uses[3] = {true, true, !direct};
  lanes.wide =
      wide_shape(l.call.plan, l.view.world, lanes.sent[1].vectors * kVectorBytes, uses, true);
  AllreduceLaunch wide{l.view, l.call, l.stream, kernels::allreduce_wide};
  if (whole) wide.shared = shared_bytes(lanes.wide, l.view.world, true);
  wide.run(whole, k, lanes);
}

/// Launches a call by chunks, with one lane or several lanes for each block.
void lanes(const AllreduceLaunch& l) {
  KernelCall k = kernel_call_of(l);
  k.fingerprint = fingerprint(l.call.descriptor);
  const bool direct = goes_into_outputs(l.call);
  LaneArguments lanes{};
  lanes.area = l.view.layout.lanes;
  const int32_t width = l.call.plan.width;
  const uint32_t slot = lanes.area.slot_bytes;
  const uint32_t most =
      width > 0 ? largest_wide_chunk(Collective::allreduce, l.view.world, slot) : slot;
  const LaneChunks chunks(sent_vectors(l.call, l.view.world),
                          l.call.plan.blocks * std::max(width, 1), most / kVectorBytes);
  const uint32_t mark = fingerprint_of_lanes(l.call.descriptor, direct);
  for (int distance = 0; distance < l.view.world; ++distance) {
    lanes.sent[distance] = lanes.received[distance] = chunks;
    lanes.passed[distance] = lanes.gathered[distance] = chunks;
    lanes.fingerprint[distance] = mark;
    if (!direct) continue;
    lanes.output[distance] =
        static_cast<char*>(l.call.peer_output[(l.view.rank + distance) % l.view.world]);
  }
  if (width > 0) return wide_lanes(l, k, lanes, direct);
  l.run(is_whole_sum(l.call, kVectorBytes), k, lanes);
}

/// Uses barriers, whose flags carry fingerprints.
void pull(const AllreduceLaunch& l) {
  KernelCall k = kernel_call_of(l);
  k.fingerprint = fingerprint(l.call.descriptor);
  PullArguments pull = pull_arguments_of(l.view, l.call);
  l.run(false, k, pull);
}

/// The same by multicast.
void multimem(const AllreduceLaunch& l) {
  KernelCall k = kernel_call_of(l);
  k.fingerprint = fingerprint(l.call.descriptor);
  PullArguments pull = pull_arguments_of(l.view, l.call);
  MulticastArguments multicast = multicast_arguments_of(l.view, l.call);
  l.run(false, k, pull, multicast);
}

constexpr LauncherRow<AllreduceCall> kLaunchers[] = {
    {Algorithm::oneshot_push, kAllreduce, kernels::allreduce_oneshot_push, push},
    {Algorithm::twoshot_push, kAllreduce, kernels::allreduce_twoshot_push, push},
    {Algorithm::twoshot_lanes, kAllreduce, kernels::allreduce_lanes, lanes},
    {Algorithm::pull_push, kAllreduce, kernels::allreduce_pull_push, pull},
    {Algorithm::oneshot_pull, kAllreduce, kernels::allreduce_oneshot_pull, pull},
    {Algorithm::twoshot_pull, kAllreduce, kernels::allreduce_twoshot_pull, pull},
    {Algorithm::multimem_oneshot, kAllreduce, kernels::allreduce_multimem_oneshot, multimem},
    {Algorithm::multimem_twoshot, kAllreduce, kernels::allreduce_multimem_twoshot, multimem},
    {Algorithm::multimem_gather, kAllreduce, kernels::allreduce_multimem_gather, multimem},
};
static_assert(is_complete(DeviceKind::cuda, kAllreduce, [](Collective c, Algorithm a) {
  return find_launcher(kLaunchers, c, a) != nullptr;
}));

static_assert(take_epilogues(kLaunchers, kAllreduce, Algorithm::pull_push));

}  // namespace

void allreduce(const CudaView& view, const AllreduceCall& call, Stream stream) {
  launch_by(kLaunchers, view, call, stream);
}

void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op, Stream stream) {
  GatheredTensors call;
  std::copy_n(inputs, world, call.input);
  call.world = world;
  call.output = output;
  call.numel = numel;
  call.reduce_op = op;
  const uint64_t vectors = ceil_div<uint64_t>(numel * dtype_size(dtype), kVectorBytes);
  if (vectors == 0) return;
  Plan plan;
  plan.threads = 256;
  plan.blocks = static_cast<int32_t>(std::min<uint64_t>(ceil_div<uint64_t>(vectors, 256), 1024));
  void* arguments[] = {&call};
  launch(reduce_local({dtype, world, false}), plan, PdlLevel::off, arguments, stream,
         "the local reduction");
}

}  // namespace collx::cuda
