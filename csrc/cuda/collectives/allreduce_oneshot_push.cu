// All-reduce, one-shot, by pushing: every rank stores its tensor into its slots at every peer,
// polls its own slots until all words are there, and reduces in rank order.
//
// Costs W-1 times the tensor on each link, and one flight over it: for small tensors.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

struct Sent {
  uint32_t epoch;
  Vector vector;
};

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    oneshot_push(const __grid_constant__ KernelCall call) {
  using S = Slots<D>;
  constexpr int kRanks = World<W>::kRanks;
  Session<Simple> session(call);
  const int world = World<W>::size(call);
  const ReduceOp op = Simple ? ReduceOp::sum : call.reduce_op;
  using Tensor = VectorTensor<dtype_size(D), Simple>;
  const Tensor input(call.input, call.numel), output(call.output, call.numel);
  Tiles<Simple> tiles(call);

  uint32_t use = 0, n = 0;
  for (uint64_t done = 0; Simple || done < call.vectors; done += n) {
    const uint64_t left = call.vectors - done;
    n = Simple || left < call.capacity ? static_cast<uint32_t>(left) : call.capacity;
    if (!Simple && use > 0) next_use();

    // Epoch, data and the poison word are in flight together: none is looked at before push().
    const auto read = [&](uint32_t i) { return Sent{tiles.epoch(i), input.load(done + i)}; };

    const auto push = [&](uint32_t i, Sent& sent) {
      if (!session.alive()) return;
      if (!Simple) sent.epoch += use;
      sent.vector = S::sendable(sent.vector);
      const uint32_t at = slot_offset<S>(call, 0, sent.epoch, i);
#pragma unroll
      for (int distance = 1; distance < kRanks; ++distance) {
        if (distance < world) S::push(call.outgoing[distance] + at, sent.vector, sent.epoch);
      }
    };

    const auto reduce = [&](uint32_t i, const Sent& sent) {
      const uint32_t at = slot_offset<S>(call, 0, sent.epoch, i);
      const Arrivals<kRanks> arrivals(call, at);
      Vector v[kRanks];
      if (!await_vectors<S>(session, Phase::arrival, world, sent.epoch, sent.vector, arrivals, v)) {
        return;
      }
      output.store(done + i, reduce_vectors<D>(v, world, op));
      arrivals.template rearm<S>(world);
    };

    if constexpr (Simple) {
      tiles.for_own(n, [&](uint32_t i) {
        Sent sent = read(i);
        push(i, sent);
        reduce(i, sent);
      });
      use = 1;
      break;
    } else {
      tiles.for_own(n, [&](uint32_t i) {
        Sent sent = read(i);
        push(i, sent);
      });
      tiles.for_own(n, [&](uint32_t i) {
        Sent sent = read(i);
        sent.epoch += use;
        sent.vector = S::sendable(sent.vector);
        reduce(i, sent);
      });
      ++use;
    }
  }
  tiles.finish(session, use, n);
}

}  // namespace

Kernel allreduce_oneshot_push(const Instance& i) {
  return for_all(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(oneshot_push<D, W, Simple>); });
}

}  // namespace collx::cuda
