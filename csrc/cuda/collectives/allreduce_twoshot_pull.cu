// All-reduce, two-shot, by pulling: every rank reduces its part of all inputs into its region,
// and after a barrier everyone gathers the parts from there. Symmetric inputs are read where they
// are; others are staged first.
//
// Costs 2 (W-1)/W of the tensor on each link, and a barrier for each step of each chunk.
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W>
class TwoshotPull {
  using Tensor = VectorTensor<dtype_size(D)>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ TwoshotPull(Session<false>& session, const PullArguments& pull)
      : session_(session),
        call_(session.call),
        pull_(pull),
        world_(World<W>::size(call_)),
        most_(pull.result_bytes / kVectorBytes),
        input_(call_.input, call_.numel),
        output_(call_.output, call_.numel),
        parts_(input_.vectors(), world_) {}

  __device__ void run() {
    const bool staged = pull_.input[0] == nullptr;
    run_barriers(session_, !staged, parts_.largest(), most_,
                 step([this](const Half& half) { stage(half); }, Phase::stage_barrier, staged),
                 step([=, this](const Half& half) { reduce(half, staged); }, Phase::gather),
                 step([this](const Half& half) { gather(half); }));
  }

 private:
  /// Where the part of `owner` begins among the inputs that `rank` has staged.
  __device__ __forceinline__ Vector* staging(int rank, int owner, const Half& half) const {
    return pull_.staged(call_, rank, half.parity) + static_cast<uint64_t>(owner) * most_;
  }

  __device__ __forceinline__ void stage(const Half& half) {
    for_own(half.count, [&](uint64_t i) {
#pragma unroll
      for (int owner = 0; owner < kRanks; ++owner) {
        if (owner >= world_ || owner == call_.rank) continue;
        const Part part = parts_.part(owner);
        const uint64_t j = half.first + i;
        if (j < part.count) staging(call_.rank, owner, half)[i] = input_.load(part.start + j);
      }
    });
  }

  __device__ __forceinline__ void reduce(const Half& half, bool staged) {
    const Part part = parts_.part(call_.rank);
    for_own(half.count, [&](uint64_t i) {
      const uint64_t j = half.first + i;
      if (j >= part.count) return;
      Vector v[kRanks];
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer >= world_) continue;
        if (peer == call_.rank) {
          v[peer] = input_.load(part.start + j);
        } else if (staged) {
          v[peer] = ptx::ld_relaxed_sys(staging(peer, call_.rank, half) + i);
        } else {
          v[peer] = Tensor(pull_.input[peer], call_.numel).load_peer(part.start + j);
        }
      }
      const Vector sum = reduce_vectors<D>(v, world_, call_.reduce_op);
      pull_.passed(call_, call_.rank, half.parity)[i] = sum;
      output_.store(part.start + j, sum);
    });
  }

  __device__ __forceinline__ void gather(const Half& half) {
    for_own(half.count, [&](uint64_t i) {
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        if (d >= world_) continue;
        const int owner = (call_.rank + d) % world_;
        const Part part = parts_.part(owner);
        const uint64_t j = half.first + i;
        if (j >= part.count) continue;
        output_.store(part.start + j,
                      ptx::ld_relaxed_sys(pull_.passed(call_, owner, half.parity) + i));
      }
    });
  }

  Session<false>& session_;
  const KernelCall& call_;
  const PullArguments& pull_;
  const int world_;
  const uint64_t most_;
  const Tensor input_, output_;
  const Partition parts_;
};

template <DType D, int W>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twoshot_pull(const __grid_constant__ KernelCall call,
                 const __grid_constant__ PullArguments pull) {
  Session<false> session(call);
  TwoshotPull<D, W>(session, pull).run();
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all calls.
Kernel allreduce_twoshot_pull(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() { return as_kernel(twoshot_pull<D, W>); });
}

}  // namespace collx::cuda
