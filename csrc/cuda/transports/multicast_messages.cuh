// Messages by multicast: their location in the tensors of all ranks and in the staging memory.
#pragma once

#include "multicast.cuh"

namespace collx::cuda {

/// A message at the same place in every rank's tensor. `tensors`: the start of each tensor.
/// `messages`: the message in each tensor, by distance.
template <typename M, DType D>
class EveryMessage {
 public:
  __device__ __forceinline__ EveryMessage(const EveryRank& tensors, const Message* messages)
      : tensors_(tensors), messages_(messages) {}

  __device__ __forceinline__ Vector sum(uint64_t i) const {
    const KernelCall& call = tensors_.call;
    const Run<> own(messages_[0]);
    if (__builtin_expect(own.whole(i), 1)) return M::template sum<D>(tensors_, offset(own, i));
    return sum_of_ranks<D>(call.world, [&](int rank) {
      return Run<>(messages_[call.distance_to(rank, call.world)]).load_peer(i);
    });
  }
  __device__ __forceinline__ void store(uint64_t i, Vector v) const {
    const Run<> own(messages_[0]);
    if (__builtin_expect(own.whole(i), 1)) return M::store(tensors_, offset(own, i), v);
#pragma unroll 1
    for (int d = 0; d < tensors_.call.world; ++d) Run<>(messages_[d]).store(i, v);
  }

 private:
  __device__ __forceinline__ uint64_t offset(const Run<>& own, uint64_t i) const {
    return static_cast<uint64_t>(own.address(i * kVectorBytes) - tensors_.at(tensors_.call.rank));
  }

  const EveryRank tensors_;
  const Message* const messages_;
};

/// The staging memory, divided among the messages that go through it: one message from or to each
/// rank. If there is a root, there is only one message.
struct MessageRooms {
  const KernelCall& call;
  const bool one;
  const uint64_t each;  // vectors

  __device__ __forceinline__ MessageRooms(const KernelCall& call, const Routes& routes,
                                          const PullArguments& pull)
      : call(call),
        one(routes.has_root),
        each((one ? pull.staging_bytes : pull.result_bytes) / kVectorBytes) {}

  /// The number of vectors before those of the rank at a distance.
  __device__ __forceinline__ uint64_t first(int distance) const {
    return one ? 0 : static_cast<uint32_t>(call.rank_at(distance, call.world)) * each;
  }
};

}  // namespace collx::cuda
