// Sum and maximum over a row that the blocks of a cluster hold in registers.
//
// The sum is the row's tree of docs/numerics.md: neighbours, then neighbouring sums. Lanes, warps
// and blocks stand in the order of the row's elements and are powers of two, so each of them is a
// subtree; x + y = y + x makes every lane of a butterfly compute the same bits.
#pragma once

#include "../../protocol/norm_plan.h"
#include "../ptx/cluster.cuh"

namespace collx::cuda {

struct RowTotal {
  float sum;
  uint32_t largest;  // of magnitudes
};

/// The subtree of n = 2^k neighbours.
template <int N>
__device__ __forceinline__ float tree(const float (&values)[N]) {
  float t[N];
#pragma unroll
  for (int i = 0; i < N; ++i) t[i] = values[i];
#pragma unroll
  for (int width = 1; width < N; width *= 2) {
#pragma unroll
    for (int i = 0; i < N; i += 2 * width) t[i] = t[i] + t[i + width];
  }
  return t[0];
}

/// Every thread of the cluster makes one, first thing, and calls it equally often.
class RowReduction {
 public:
  __device__ explicit RowReduction(const NormShape& shape)
      : cluster_(shape.cluster), rank_(blockIdx.x % shape.cluster) {
    // Nobody stores into a neighbour that has not started.
    if (cluster_ > 1) ptx::cluster_arrive();
  }

  /// `leaf`: the subtree of this thread's vector.
  __device__ __forceinline__ RowTotal operator()(float leaf, uint32_t largest) {
    largest = __reduce_max_sync(~0u, largest);
    const float sum = butterfly(leaf);
    const uint32_t warps = blockDim.x / kWarpLanes, warp = threadIdx.x / kWarpLanes;
    const uint32_t lane = threadIdx.x % kWarpLanes;
    Entry* entries = memory()[turn_];
    if (cluster_ == 1) {
      if (lane == 0) entries[warp] = {sum, largest};
      __syncthreads();
    } else {
      if (!started_) ptx::cluster_wait();
      started_ = true;
      if (lane < cluster_) {
        ptx::st_cluster(&entries[rank_ * warps + warp], lane, bits_of(sum), largest);
      }
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
    // The next row uses the other entries: who writes those has seen all read the ones before.
    turn_ ^= 1;
    return combine(entries, cluster_ * warps, lane);
  }

 private:
  struct Entry {
    float sum;
    uint32_t largest;
  };
  static constexpr uint32_t kEntries = kMostCluster * kFullBlock / kWarpLanes;
  using Memory = Entry[2][kEntries];

  static __device__ __forceinline__ Memory& memory() {
    __shared__ __align__(16) Memory entries;
    return entries;
  }

  static __device__ __forceinline__ float butterfly(float sum) {
#pragma unroll
    for (uint32_t distance = 1; distance < kWarpLanes; distance *= 2) {
      sum = sum + __shfl_xor_sync(~0u, sum, distance);
    }
    return sum;
  }

  /// `count`: a power of two, neighbours with the same lane.
  static __device__ __forceinline__ RowTotal combine(const Entry* entries, uint32_t count,
                                                     uint32_t lane) {
    constexpr uint32_t kEach = kEntries / kWarpLanes;
    const uint32_t each = count > kWarpLanes ? count / kWarpLanes : 1;
    float sums[kEach] = {};
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (i < each && lane * each < count) {
        const Entry entry = entries[lane * each + i];
        sums[i] = entry.sum;
        largest = max(largest, entry.largest);
      }
    }
    return {butterfly(tree(sums)), __reduce_max_sync(~0u, largest)};
  }

  const uint32_t cluster_, rank_;
  uint32_t turn_ = 0;
  bool started_ = false;
};

/// Sums of the steps of a long row, one after the other: the tree above them, zeros behind the last.
class StepSums {
 public:
  __device__ void add(float sum) {
    int level = 0;
    for (; (count_ >> level & 1) != 0; ++level) sum = levels_[level] + sum;
    levels_[level] = sum;
    ++count_;
  }
  __device__ float total() const {
    float sum = 0;
    bool any = false;
    for (int level = 0; level < kLevels; ++level) {
      if ((count_ >> level & 1) == 0) continue;
      sum = any ? levels_[level] + sum : levels_[level];
      any = true;
    }
    return sum;
  }

 private:
  static constexpr int kLevels = 32;
  float levels_[kLevels];
  uint32_t count_ = 0;
};

}  // namespace collx::cuda
