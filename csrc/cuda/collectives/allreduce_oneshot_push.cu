// All-reduce, one-shot, by pushing: every rank stores its tensor into its slots at every peer,
// polls its own slots until all words are there, and reduces in rank order.
//
// Costs W-1 times the tensor on each link, and one flight over it: for small tensors.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    oneshot_push(const __grid_constant__ KernelCall call) {
  using S = Slots<D>;
  using Tensor = VectorTensor<dtype_size(D), Simple>;
  constexpr int kRanks = World<W>::kRanks;
  Session<Simple> session(call);
  const int world = World<W>::size(call);
  const Tensor input(call.input, call.numel), output(call.output, call.numel);
  // Threads that have a mask, or nothing behind the tensor's end, go along.
  const auto carries = [&](uint64_t j) { return !S::kMasked || j < input.vectors(); };
  const auto load = [&](uint64_t j) { return carries(j) ? input.load(j) : Vector{}; };
  Vector own;

  // Epoch, data and the poison word are in flight together: none is looked at before all are.
  const auto push = [&](const Place& at) {
    own = load(data_index<S>(at.vector));
    const Vector wire = S::sendable(own);
    own = S::own(own);
    if (!session.alive()) return;
    const uint32_t offset = slot_offset(call, 0, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world) S::push(call.outgoing[d] + offset, wire);
    }
  };

  const auto reduce = [&](const Place& at) {
    const uint64_t j = data_index<S>(at.vector);
    if (!Simple) own = S::own(load(j));
    const Arrivals<kRanks> arrivals(call, slot_offset(call, 0, at.epoch, at.i));
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session, Phase::arrival, world, at.epoch, own, arrivals, v);
    unmask<S>(call, world, v);
    if (!arrived) return;
    const ReduceOp op = Simple ? ReduceOp::sum : call.reduce_op;
    if (carries(j)) output.store(j, reduce_vectors<D>(v, world, op));
    arrivals.template rearm<S>(world);
  };

  run_slots<Order::phases>(
      session, [] {}, push, reduce);
}

}  // namespace

Kernel allreduce_oneshot_push(const Instance& i) {
  return for_all(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(oneshot_push<D, W, Simple>); });
}

}  // namespace collx::cuda
