// Sum and maximum over a row that the blocks of a cluster hold in registers.
//
// The sum is the tree over the row in docs/internals/numerics.md: it adds neighbors, then
// neighboring sums. Lanes, warps and blocks follow the order of the row's elements, and their
// counts are powers of two, so each of them is a subtree. Addition is commutative, so every lane of
// a butterfly computes the same bits.
#pragma once

#include "../arguments/norm_arguments.cuh"
#include "../ptx/cluster.cuh"
#include "reduce.cuh"

namespace collx::cuda {

struct RowTotal {
  float sum;
  uint32_t largest;  // largest magnitude
};

/// The subtree of N neighbors. N is a power of two.
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

/// Every thread of the cluster constructs one at the start of the kernel and calls it equally
/// often. It only accesses shared memory, so it may be constructed before the wait for upstream
/// work.
class RowReduction {
 public:
  __device__ explicit RowReduction(const NormArguments& norm)
      : cluster_(norm.shape.cluster), rank_(norm.cluster_rank()) {
    if (cluster_ == 1) return;
    if (threadIdx.x == 0) {
      ptx::init(&memory().arrived[0]);
      ptx::init(&memory().arrived[1]);
    }
    // No block may store into a block of the cluster that has not started.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

  /// `leaf`: the subtree of this thread's vector.
  __device__ __forceinline__ RowTotal operator()(float leaf, uint32_t largest) {
    const float leaves[1] = {leaf};
    const uint32_t most[1] = {largest};
    RowTotal total[1];
    reduce(leaves, most, total);
    return total[0];
  }

  /// The same of N rows at once.
  template <int N>
  __device__ __forceinline__ void reduce(const float (&leaf)[N], const uint32_t (&largest)[N],
                                         RowTotal (&total)[N]) {
    static_assert(N <= kMostRows);
    const uint32_t warps = blockDim.x / kWarpLanes, warp = threadIdx.x / kWarpLanes;
    const uint32_t lane = threadIdx.x % kWarpLanes;
    // Two sets of entries alternate. A thread that writes the other set in the next call has
    // received the entries of all threads in this call, so all of them have already read that set.
    Memory& m = memory();
    const uint32_t turn = calls_ % 2;
    ptx::TransactionBarrier* arrived = &m.arrived[turn];
    if (cluster_ > 1 && threadIdx.x == 0) {
      ptx::expect(arrived, cluster_ * warps * N * sizeof(Entry));
    }
#pragma unroll
    for (int row = 0; row < N; ++row) {
      const uint32_t most = __reduce_max_sync(~0u, largest[row]);
      const float sum = butterfly(leaf[row]);
      Entry* entry = &m.entries[turn][row][rank_ * warps + warp];
      if (cluster_ == 1) {
        if (lane == 0) *entry = {sum, most};
      } else if (lane < cluster_) {
        ptx::st_cluster(entry, arrived, lane, bits_of(sum), most);
      }
    }
    if (cluster_ == 1) {
      __syncthreads();
    } else {
      ptx::wait(arrived, calls_ / 2 % 2);
    }
    ++calls_;
#pragma unroll
    for (int row = 0; row < N; ++row) {
      total[row] = combine(m.entries[turn][row], cluster_ * warps, lane);
    }
  }

 private:
  struct alignas(8) Entry {
    float sum;
    uint32_t largest;
  };
  static constexpr uint32_t kEntries = kMostCluster * kFullBlock / kWarpLanes;
  static constexpr int kMostRows = kMaxCudaRanks;
  struct Memory {
    Entry entries[2][kMostRows][kEntries];
    ptx::TransactionBarrier arrived[2];
  };

  static __device__ __forceinline__ Memory& memory() {
    __shared__ Memory memory;
    return memory;
  }

  static __device__ __forceinline__ float butterfly(float sum) {
#pragma unroll
    for (uint32_t distance = 1; distance < kWarpLanes; distance *= 2) {
      sum = sum + __shfl_xor_sync(~0u, sum, distance);
    }
    return sum;
  }

  /// `count`: a power of two. Each lane combines neighboring entries.
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
  uint32_t calls_ = 0;
};

/// Adds the sums of the steps of a long row in order, as the tree above them. Zeros follow the last
/// sum.
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
