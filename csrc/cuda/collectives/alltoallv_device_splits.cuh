// Alltoallv with splits in device memory. The ranks exchange the number of rows that they are going
// to send (split_counts.cuh), and send these rows through channels at the same time. A rank waits
// for rows after it has received the counts. With two ranks, a long message is left to a second
// kernel (alltoallv_long.cuh): by then the sender and the receiver both know its length.
#pragma once

#include "one_way.cuh"
#include "split_counts.cuh"

namespace collx::cuda {

/// The number of wire vectors of the longest message, from distance `d` on.
__device__ __forceinline__ uint64_t most_vectors(const Message* messages, int world, int d) {
  uint64_t vectors = 0;
  for (; d < world; ++d) vectors = max(vectors, messages[d].wire);
  return vectors;
}

/// Whether a message is left to the second kernel. If so, it does not use the channels.
template <int Ranks, bool Simple>
__device__ __forceinline__ bool is_left(const KernelCall& call, Message& m) {
  if (Simple || Ranks > 2 || !is_long(m.wire, call.capacity)) return false;
  m.wire = 0;
  return true;
}

/// Channels whose messages become known during the call: first the messages that this rank sends,
/// then those that it receives.
template <int Ranks, bool Simple>
class SplitChannels : public Channels<Ranks, Simple> {
  using Base = Channels<Ranks, Simple>;

 public:
  static constexpr bool kWhole = false;
  static constexpr bool kTakesOwn = Simple;
  using Transport::pairs;
  /// Announces the counts to the other ranks. If the splits do not fit the input, the block fails.
  __device__ __forceinline__ SplitChannels(const KernelCall& call, Patience& patience,
                                           const Routes& tensors, const DeviceSplits& given,
                                           Agreed& agreed)
      : Base(call, patience, agreed.routes, 0, tensors) {
    announce_counts<Ranks>(call, patience, tensors, given, agreed, [&](int peer) {
      if (peer == call.rank) return;
      agreed.long_from =
          is_left<Ranks, Simple>(call, agreed.routes.from[call.distance_to(peer, call.world)]);
    });
    patience.agree();
    this->extend(most_vectors(agreed.routes.from, call.world, 1));
  }

  /// Waits for the counts, and computes the layout of the received rows. Returns false if they do
  /// not fit the output.
  static __device__ __forceinline__ bool meet(Session<SplitChannels>& session,
                                              const Routes& tensors, const DeviceSplits& given,
                                              Agreed& agreed) {
    const KernelCall& call = session.call;
    advance_counts(call, agreed);
    await_counts<Ranks>(call, session.patience, tensors, given, agreed, [&](int peer) {
      if (peer == call.rank) return;
      agreed.long_to =
          is_left<Ranks, Simple>(call, agreed.routes.to[call.distance_to(peer, call.world)]);
    });
    if (!session.patience.agree()) return false;
    session.transport.extend(most_vectors(agreed.routes.to, call.world, kTakesOwn ? 0 : 1));
    return true;
  }
};

/// `Simple`: the whole tensors fit into one use of the channels, with at most one vector for each
/// thread, and the call is unchecked. Other ranks may have tensors that do not fit.
template <int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, World<W>::kBlocksHeld)
    alltoallv_device_splits_kernel(const __grid_constant__ KernelCall call,
                                   const __grid_constant__ Routes tensors,
                                   const __grid_constant__ DeviceSplits given) {
  using Splits = SplitChannels<World<W>::kRanks, Simple>;
  __shared__ Agreed agreed;
  Session<Splits> session(call, tensors, given, agreed);
  if (!session.alive()) return;
  const Routes& routes = agreed.routes;
  const auto meet = [&] { return Splits::meet(session, tensors, given, agreed); };
  const auto keep = [&](Slice slice) {
    if (W == 2 && !Simple && (agreed.long_from || agreed.long_to)) return;
    if constexpr (!Simple) copy_own(routes.from[0], routes.to[0], slice);
    clear(routes.cleared, slice);
  };
  run_one_way<Copy>(session, routes, World<W>::size(call), meet, keep);
}

}  // namespace collx::cuda
