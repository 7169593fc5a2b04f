// All-reduce, one-shot, by pushing: every rank stores its tensor into its slots at every peer,
// polls its own slots until all words have arrived, and reduces in rank order.
//
// Cost: W-1 times the tensor on each link, and one link latency. Intended for small tensors.
#pragma once

#include "../stages/combine.cuh"
#include "../transports/schedules.cuh"

namespace collx::cuda {

template <typename Stage, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    allreduce_oneshot_push_kernel(const __grid_constant__ KernelCall call,
                                  const __grid_constant__ Epilogue... epilogue) {
  using Wire = WireFor<Stage>;
  using Tensor = DenseTensor<Stage::kElementBytes, Simple>;
  constexpr int kRanks = World<W>::kRanks;
  Session<Tiles<Simple>> session(call);
  const int world = World<W>::size(call);
  const Tensor input(call.input, call.numel);
  const auto output = Stage::template output<Simple>(call.output, call.numel, epilogue...);
  // Threads that hold a mask, or only elements past the end of the tensor, also take part.
  const auto carries = [&](uint64_t j) { return !Wire::kMasked || j < input.vectors(); };
  const auto load = [&](uint64_t j) { return carries(j) ? input.load(j) : Vector{}; };
  Vector own;

  // The loads of the epoch, the data and the poison word are in flight together: nothing waits for
  // one of them before all have started.
  const auto push = [&](const Place& at) {
    own = load(Wire::data_index(at.vector));
    const PeerSlots<Wire, kRanks> slots{call, world, slot_offset(call, 0, at.epoch, at.i)};
    const Vector wire = slots.prepare(own);
    own = Wire::own(own);
    if (session.alive()) slots.put(wire);
  };
  const auto reduce = [&](const Place& at) {
    const uint64_t j = Wire::data_index(at.vector);
    if (!Simple) own = Wire::own(load(j));
    const auto all = from_slots<Wire, kRanks>(session, Phase::arrival, at.epoch,
                                              slot_offset(call, 0, at.epoch, at.i), world, own);
    reduce_into<Stage, Simple>(call, world, all, TensorSink{output, j, carries(j)});
  };
  run_slots<Order::behind>(
      session, [](Slice) {}, push, reduce);
}

}  // namespace collx::cuda
