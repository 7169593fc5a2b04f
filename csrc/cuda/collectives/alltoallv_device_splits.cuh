// Alltoallv with splits in device memory. The ranks exchange the number of rows that they are going
// to send (split_counts.cuh), and send these rows through channels at the same time. A rank waits
// for rows after it has received the counts. With two ranks, a long message is left to a second
// kernel (alltoallv_long.cuh): by then the sender and the receiver both know its length.
#pragma once

#include "one_way.cuh"
#include "split_counts.cuh"

namespace collx::cuda {

/// The number of wire vectors of the longest message to or from another rank.
__device__ __forceinline__ uint64_t most_vectors(const Message* messages, int world) {
  uint64_t vectors = 0;
  for (int d = 1; d < world; ++d) vectors = max(vectors, messages[d].wire);
  return vectors;
}

/// Whether a message is left to the second kernel. If so, it does not use the channels.
template <int Ranks>
__device__ __forceinline__ bool is_left(const KernelCall& call, Message& m) {
  if (Ranks > 2 || !is_long(m.wire, call.capacity)) return false;
  m.wire = 0;
  return true;
}

/// Channels whose messages become known during the call: first the messages that this rank sends,
/// then those that it receives. The counts of more than two ranks would take registers that the
/// vectors need.
template <int Ranks>
class SplitChannels : public Channels<Ranks, false, Ranks == 2> {
  using Base = Channels<Ranks, false, Ranks == 2>;

 public:
  using Transport::pairs;
  /// Announces the counts to the other ranks. If the splits do not fit the input, the block fails.
  __device__ __forceinline__ SplitChannels(const KernelCall& call, Patience& patience,
                                           const Routes& tensors, const DeviceSplits& given,
                                           Agreed& agreed)
      : Base(call, patience, agreed.routes, 0, tensors) {
    announce_counts(call, patience, tensors, given, agreed, [&](int peer) {
      if (peer == call.rank) return;
      agreed.long_from =
          is_left<Ranks>(call, agreed.routes.from[call.distance_to(peer, call.world)]);
    });
    patience.agree();
    this->extend(most_vectors(agreed.routes.from, call.world));
  }

  /// Waits for the counts, and computes the layout of the received rows. Returns false if they do
  /// not fit the output.
  static __device__ __forceinline__ bool meet(Session<SplitChannels>& session,
                                              const Routes& tensors, const DeviceSplits& given,
                                              Agreed& agreed) {
    const KernelCall& call = session.call;
    advance_counts(call, agreed);
    await_counts(call, session.patience, tensors, given, agreed, [&](int peer) {
      if (peer == call.rank) return;
      agreed.long_to = is_left<Ranks>(call, agreed.routes.to[call.distance_to(peer, call.world)]);
    });
    if (!session.patience.agree()) return false;
    session.transport.extend(most_vectors(agreed.routes.to, call.world));
    return true;
  }
};

template <int W>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    alltoallv_device_splits_kernel(const __grid_constant__ KernelCall call,
                                   const __grid_constant__ Routes tensors,
                                   const __grid_constant__ DeviceSplits given) {
  using Splits = SplitChannels<World<W>::kRanks>;
  __shared__ Agreed agreed;
  Session<Splits> session(call, tensors, given, agreed);
  if (!session.alive()) return;
  const Routes& routes = agreed.routes;
  const auto meet = [&] { return Splits::meet(session, tensors, given, agreed); };
  const auto keep = [&](Slice slice) {
    if (W == 2 && (agreed.long_from || agreed.long_to)) return;
    copy_own(routes.from[0], routes.to[0], slice);
    clear(routes.cleared, slice);
  };
  run_one_way<Copy>(session, routes, World<W>::size(call), meet, keep);
}

}  // namespace collx::cuda
