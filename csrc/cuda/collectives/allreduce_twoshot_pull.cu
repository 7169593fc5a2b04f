// All-reduce, two-shot, by pulling: every rank reduces its part of all inputs into its region,
// and after a barrier everyone gathers the parts from there. Symmetric inputs are read where they
// are; others are staged first.
//
// Costs 2 (W-1)/W of the tensor on each link, and a barrier for each step of each chunk.
#include "../transports/barrier.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W>
class TwoshotPull {
  using Tensor = VectorTensor<dtype_size(D)>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ TwoshotPull(Session<false>& session, const PullArguments& pull)
      : call_(session.call),
        pull_(pull),
        barrier_(call_, session.patience),
        world_(World<W>::size(call_)),
        input_(call_.input, call_.numel),
        output_(call_.output, call_.numel),
        parts_(input_.vectors(), world_) {}

  __device__ void run() {
    const bool staged = pull_.input[0] == nullptr;
    const uint64_t largest = parts_.largest();
    const uint64_t chunk = pull_.result_bytes / kVectorBytes;
    bool going = staged || barrier_.sync(Phase::start_barrier);
    // The halves take turns: one is written again only after two more barriers, when all peers
    // have read it.
    for (uint64_t done = 0; done < largest && going; done += chunk, half_ ^= 1) {
      const uint64_t left = largest - done, n = left < chunk ? left : chunk;
      if (staged) {
        for_own(n, [&](uint64_t i) { stage(i, done + i, chunk); });
        going = barrier_.sync(Phase::stage_barrier);
      }
      if (going) for_own(n, [&](uint64_t i) { reduce(i, done + i, chunk, staged); });
      going = going && barrier_.sync(Phase::gather);
      if (going) for_own(n, [&](uint64_t i) { gather(i, done + i); });
    }
    if (going) barrier_.sync(Phase::end_barrier);
    barrier_.finish();
  }

 private:
  template <typename F>
  __device__ __forceinline__ void for_own(uint64_t n, F f) {
    for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
      f(i);
    }
  }

  __device__ __forceinline__ Part part_of(int rank) const { return parts_.part(rank); }
  /// Vector i of the part of `owner` among the inputs that `rank` has staged.
  __device__ __forceinline__ Vector* staging(int rank, int owner, uint64_t chunk,
                                             uint64_t i) const {
    return reinterpret_cast<Vector*>(pull_.region[rank] + pull_.staging +
                                     half_ * pull_.staging_bytes) +
           static_cast<uint64_t>(owner) * chunk + i;
  }
  __device__ __forceinline__ Vector* result(int rank, uint64_t i) const {
    return reinterpret_cast<Vector*>(pull_.region[rank] + pull_.results +
                                     half_ * pull_.result_bytes) +
           i;
  }

  __device__ __forceinline__ void stage(uint64_t i, uint64_t j, uint64_t chunk) {
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner >= world_ || owner == call_.rank) continue;
      const Part part = part_of(owner);
      if (j < part.count) *staging(call_.rank, owner, chunk, i) = input_.load(part.start + j);
    }
  }

  __device__ __forceinline__ void reduce(uint64_t i, uint64_t j, uint64_t chunk, bool staged) {
    const Part part = part_of(call_.rank);
    if (j >= part.count) return;
    Vector v[kRanks];
#pragma unroll
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer >= world_) continue;
      if (peer == call_.rank) {
        v[peer] = input_.load(part.start + j);
      } else if (staged) {
        v[peer] = ptx::ld_relaxed_sys(staging(peer, call_.rank, chunk, i));
      } else {
        v[peer] = Tensor(pull_.input[peer], call_.numel).load_peer(part.start + j);
      }
    }
    const Vector sum = reduce_vectors<D>(v, world_, call_.reduce_op);
    *result(call_.rank, i) = sum;
    output_.store(part.start + j, sum);
  }

  __device__ __forceinline__ void gather(uint64_t i, uint64_t j) {
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world_) continue;
      const int owner = (call_.rank + d) % world_;
      const Part part = part_of(owner);
      if (j < part.count) output_.store(part.start + j, ptx::ld_relaxed_sys(result(owner, i)));
    }
  }

  const KernelCall& call_;
  const PullArguments& pull_;
  BlockBarrier barrier_;
  const int world_;
  const Tensor input_, output_;
  const Partition parts_;
  uint32_t half_ = 0;
};

template <DType D, int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twoshot_pull(const __grid_constant__ KernelCall call,
                 const __grid_constant__ PullArguments pull) {
  Session<false> session(call);
  TwoshotPull<D, W>(session, pull).run();
  session.finish();
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all calls.
Kernel allreduce_twoshot_pull(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(twoshot_pull<D, W>); });
}

}  // namespace collx::cuda
