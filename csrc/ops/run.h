// The way of every call from tensors to a backend, and what a family of operators adds to it.
#pragma once

#include "call.h"
#include "checks.h"
#include "fallback.h"

namespace collx {

/// Where the tensors of a call lie, if they are symmetric.
struct Places {
  std::optional<SymmetricRange> input;
  std::optional<SymmetricRange> output;
};

/// A call under way. Made on the stack, by a family:
///     const char* op() const
///     C call                         AllreduceCall, ExchangeCall or NormCall
///     Algorithm asked() const        as named by the user
///     Places find(SymmetricMemory&)  of what peers may touch
///     void check(const Places&)      what the algorithm asks of them
///     bool is_empty() const          nothing to do, as all ranks know
///     bool needs_no_peers() const    a rank by itself; then alone() is all
///     void alone()
///     void plan(const Places&)       fills in call.plan and call.descriptor
///     Places touched(const Places&)  of what call.plan makes peers touch
///     void fall_back()
///     bool run(const CpuView&)       false: the communicator has failed
///     void run(const CudaView&, cuda::Stream)
/// After communicator.require_usable().
template <typename Family>
void run(Family& family, Communicator& communicator) {
  const char* const op = family.op();
  const bool alone = communicator.options().world_size == 1;
  const auto held = communicator.lock();
  communicator.refuse_if_destroyed(op);  // by another thread since
  const Places places = family.find(communicator.symmetric());
  family.check(places);
  if (alone && family.needs_no_peers()) return family.alone();
  if (!alone) check_peer_access(op, family.asked(), communicator);
  if (family.is_empty() && !communicator.options().check) return;

  auto& call = family.call;
  family.plan(places);
  call.descriptor.algorithm = call.plan.named;
  call.descriptor.runs = call.plan.algorithm;
  const Places& touched = family.touched(places);
  map_peers(communicator, touched.input, touched.output, call);
  if (call.plan.algorithm == Algorithm::fallback) {
    enter_fallback(communicator, op, call.descriptor);
    family.fall_back();
  } else if (!communicator.on_cuda()) {
    if (!family.run(communicator.cpu_view())) communicator.require_usable(op);
  } else {
#if COLLX_CUDA
    family.run(communicator.cuda_view(), communicator.streams().enter());
#endif
  }
  communicator.count_call();
}

}  // namespace collx
