#include "enqueue.h"

#include <c10/util/Exception.h>

#include <array>

#include "../cpu/calls.h"
#include "epilogue.h"
#include "profiling.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAStream.h>

#include "../cuda/calls.h"
#endif

namespace collx {

namespace {

using HostStep = void (*)(const Launch& launch, const CallDescriptor& call);

/// The kernels of the plan's algorithm.
void run_kernels(const Launch& launch, const CallDescriptor& /*call*/) {
  Communicator& communicator = launch.communicator;
#if COLLX_CUDA
  if (communicator.on_cuda()) {
    launch.request.run(communicator.cuda_view(),
                       communicator.streams().enter(c10::cuda::CUDAStream(launch.stream)));
    return;
  }
#endif
  const bool done = launch.request.run(communicator.cpu_view());
  if (!done) communicator.raise_refused(launch.request.op());
}

/// Synchronizes all ranks with a checked barrier in their regions, if they have regions. The
/// barrier can name a missing rank. The process group is only used after all ranks have arrived,
/// because a collective that never completes would make it unusable for everyone. Raises
/// NotImplementedError during a capture.
void meet(const Launch& launch, const CallDescriptor& call) {
  Communicator& communicator = launch.communicator;
  const char* const op = launch.request.op();
#if COLLX_CUDA
  if (communicator.on_cuda()) {
    const c10::cuda::CUDAStream stream(launch.stream);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !capturing(stream), "collx.", op,
        ": algorithm: \"fallback\" waits on the host and cannot be captured into a CUDA graph; "
        "accepted during a capture: the algorithms on peer memory");
    const cuda::Stream entered = communicator.streams().enter(stream);
    if (!communicator.has_regions()) return;
    CudaView view = communicator.cuda_view();
    view.check = true;
    cuda::barrier(view, call, entered);
    stream.synchronize();
    communicator.require_usable(op);
    return;
  }
#endif
  if (!communicator.has_regions()) return;
  CpuView view = communicator.cpu_view();
  view.check = true;
  if (!cpu::barrier(view, call)) communicator.raise_refused(op);
}

/// After this step, all outputs may be written.
void enter([[maybe_unused]] const Launch& launch, [[maybe_unused]] const CallDescriptor& call) {
#if COLLX_CUDA
  Communicator& communicator = launch.communicator;
  const cuda::Stream stream = communicator.streams().enter(c10::cuda::CUDAStream(launch.stream));
  cuda::CopyStreams& copies = communicator.copy_streams();
  cuda::enter(communicator.cuda_view(), call, copies, stream);
  if (launch.posted_on) copies.hold(c10::cuda::CUDAStream(*launch.posted_on));
#endif
}

/// Copies into the outputs of all ranks. The copies also run if the preceding barrier has failed,
/// since no host has waited for it.
void copy([[maybe_unused]] const Launch& launch, const CallDescriptor& /*call*/) {
#if COLLX_CUDA
  Communicator& communicator = launch.communicator;
  launch.request.copy(communicator.cuda_view(), communicator.copy_streams(),
                      c10::cuda::CUDAStream(launch.stream));
#endif
}

/// After this step, all outputs have been written.
void leave([[maybe_unused]] const Launch& launch, [[maybe_unused]] const CallDescriptor& call) {
#if COLLX_CUDA
  CudaView view = launch.communicator.cuda_view();
  view.check = false;  // the ranks have compared the call
  cuda::barrier(view, call, c10::cuda::CUDAStream(launch.stream));
#endif
}

void run_through_group(const Launch& launch, const CallDescriptor& /*call*/) {
  const UseStream use(launch.stream);
  const CallLog::InGroup marked(launch.communicator.log());
  launch.request.run_through_group(launch);
}

/// The host steps that execute an algorithm, in order.
struct Launcher {
  Algorithm algorithm;
  std::array<HostStep, 3> steps;  // null: none
};

constexpr Launcher kByKernels = {Algorithm::automatic, {run_kernels}};
/// Launchers of the algorithms without kernels.
constexpr Launcher kLaunchers[] = {
    {Algorithm::fallback, {meet, run_through_group}},
    {Algorithm::copy_engine, {enter, copy, leave}},
};

constexpr const Launcher& launcher_of(Algorithm algorithm) {
  if (has_kernels(algorithm)) return kByKernels;
  for (const Launcher& launcher : kLaunchers) {
    if (launcher.algorithm == algorithm) return launcher;
  }
  throw "an algorithm without kernels has no launcher";
}
static_assert([] {
  for (const AlgorithmRow& row : kAlgorithms) launcher_of(row.algorithm);
  return true;
}());

/// Returns whether the call took a number.
bool carry_out(const Launch& launch) {
  const auto& [communicator, request, stream, posted_on] = launch;
  const bool alone = communicator.options().world_size == 1;
  const Places places = request.locate(communicator);
  if (alone && request.needs_no_peers()) {
    const UseStream use(stream);
    request.run_alone(launch);
    return false;
  }
  if (request.is_empty() && !communicator.options().check) return false;
  Call& call = request.plan(launch, places);
  call.descriptor.algorithm = call.plan.named;
  call.descriptor.runs = call.plan.algorithm;
  // A call that only prepares its kernel launches nothing, so the device does not count it either.
  const bool prepares = call.epilogue != nullptr && getting_ready();
  if (!prepares) {
    communicator.log().begin(communicator.calls(), request.op(), request.input_bytes(),
                             call.descriptor);
  }
  const ProfiledCall range(communicator, request, call);
  for (const HostStep step : launcher_of(call.plan.algorithm).steps) {
    if (step != nullptr) step(launch, call.descriptor);
  }
  return !prepares;
}

}  // namespace

#if COLLX_CUDA
void CallRequest::copy(const CudaView&, cuda::CopyStreams&, cuda::Stream) const {
  TORCH_INTERNAL_ASSERT(false, "collx.", op_, " has no copies");
}
#endif

Ticket enqueue(Communicator& communicator, CallRequest& request, c10::Stream stream,
               std::optional<c10::Stream> posted_on) {
  const OnDevice guard(communicator.options().device);
  Ticket ticket;
  {
    const auto held = communicator.lock();
    communicator.refuse_if_destroyed(request.op());  // another thread may have destroyed it
    if (carry_out({communicator, request, stream, posted_on})) communicator.count_call();
    ticket = communicator.calls();
  }
  if (request.has_rest()) {
    const UseStream use(stream);
    request.follow();
  }
  return ticket;
}

c10::Stream current_stream([[maybe_unused]] c10::Device device) {
#if COLLX_CUDA
  if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index());
#endif
  return c10::Stream(c10::Stream::DEFAULT, device);
}

#if COLLX_CUDA
UseStream::UseStream(c10::Stream stream) {
  if (stream.device().is_cuda() && stream != current_stream(stream.device())) {
    guard_.reset_stream(stream);
  }
}
#endif

}  // namespace collx
