// All-reduce and norm, two-shot, by pulling: every rank reduces, normalizes and quantizes its part
// of the rows into its region, and after a barrier everyone gathers from there. Symmetric inputs
// are read where they are; others are staged first.
//
// Costs (W-1)/W of the tensor on each link, then (W-1)/W of the results, and a barrier for each
// step of each chunk.
#include "../stages/norm.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

template <DType D>
class NormTwoshotPull {
  using E = Elements<D>;
  using Row = VectorTensor<dtype_size(D)>;
  using OwnRow = ResultRow<D, false>;
  using Bytes = NarrowSlots<E::kCount / 4>;  // a byte for each element of a vector
  using Word = NarrowSlots<1>;

 public:
  __device__ NormTwoshotPull(Session<false>& session, const NormArguments& norm,
                             const PullArguments& pull)
      : call_(session.call),
        norm_(norm),
        pull_(pull),
        session_(session),
        planes_(norm.shape, norm.residual_out != nullptr, norm.normalized != nullptr,
                dtype_size(D)),
        stage_(norm) {}

  __device__ void run() {
    const bool staged = pull_.input[0] == nullptr;
    stage_.prefetch();
    // A block that has given up goes on through all its rows, without waiting: its neighbors in the
    // cluster still count on it.
    run_barriers<true>(
        session_, !staged, norm_.rows, norm_.shape.rows_per_use,
        step([this](const Half& half) { stage(half); }, Phase::stage_barrier, staged),
        step([=, this](const Half& half) { finish_own(half, staged); }, Phase::gather),
        step([this](const Half& half) { gather(half); }));
  }

 private:
  __device__ __forceinline__ bool exists(int owner, uint64_t j) const {
    return j < norm_.parts.part(owner).count;
  }
  __device__ __forceinline__ uint64_t row(int owner, uint64_t j) const {
    return norm_.parts.part(owner).start + j;
  }
  __device__ __forceinline__ Row input_of(const void* input, uint64_t row) const {
    return {static_cast<const char*>(input) + row * norm_.cols * dtype_size(D), norm_.cols};
  }

  /// Vector i of the row at position p for `owner`, among the inputs that `rank` has staged.
  __device__ __forceinline__ Vector* staging(int rank, int owner, const Half& half, uint64_t p,
                                             uint32_t i) const {
    return pull_.staged(call_, rank, half.parity) +
           (static_cast<uint64_t>(owner) * norm_.shape.rows_per_use + p) * norm_.vectors + i;
  }
  /// Of what `rank` passes on at position p, that byte of this block's piece.
  __device__ __forceinline__ char* result(int rank, const Half& half, uint64_t p,
                                          uint32_t byte) const {
    const uint64_t piece = (p << norm_.cluster_bits) + norm_.cluster_rank();
    return reinterpret_cast<char*>(pull_.passed(call_, rank, half.parity)) +
           piece * norm_.shape.piece_tiles * kTileBytes + byte;
  }
  __device__ __forceinline__ uint32_t scale_byte() const {
    const bool groups = norm_.options.scale_mode == ScaleMode::group;
    return planes_.scales + (groups ? threadIdx.x * E::kCount /
                                          static_cast<uint32_t>(norm_.options.quant_group_size) * 4
                                    : 0);
  }

  __device__ __forceinline__ void stage(const Half& half) const {
    const uint32_t i = stage_.index();
    if (!stage_.has(i)) return;
    norm_.for_own(half.count, [&](uint64_t p) {
      const uint64_t j = half.first + p;
      for (int owner = 0; owner < call_.world; ++owner) {
        if (owner == call_.rank || !exists(owner, j)) continue;
        *staging(call_.rank, owner, half, p, i) = input_of(call_.input, row(owner, j)).load(i);
      }
    });
  }

  __device__ __forceinline__ void reduce(const Half& half, uint64_t p, uint64_t r, bool staged,
                                         Share<D>& x) const {
    const uint32_t i = stage_.index();
    Vector v[kMaxCudaRanks];
#pragma unroll
    for (int rank = 0; rank < kMaxCudaRanks; ++rank) {
      if (rank >= call_.world) continue;
      if (rank == call_.rank) {
        v[rank] = input_of(call_.input, r).load(i);
      } else {
        v[rank] = staged ? ptx::ld_relaxed_sys(staging(rank, call_.rank, half, p, i))
                         : input_of(pull_.input[rank], r).load_peer(i);
      }
    }
    fold<D>(x, v, call_.world, [](float a, float b) { return a + b; });
  }

  /// A sink for what the peers gather, and for this rank's tensors.
  struct Kept {
    const NormTwoshotPull& op;
    const Half& half;
    const uint64_t p;
    const OwnRow row;

    __device__ __forceinline__ void residual(uint32_t i, Vector v) const {
      *reinterpret_cast<Vector*>(
          op.result(op.call_.rank, half, p, op.planes_.residual + threadIdx.x * kVectorBytes)) = v;
      row.residual(i, v);
    }
    __device__ __forceinline__ void normalized(uint32_t i, Vector v) const {
      *reinterpret_cast<Vector*>(op.result(op.call_.rank, half, p,
                                           op.planes_.normalized + threadIdx.x * kVectorBytes)) = v;
      row.normalized(i, v);
    }
    __device__ __forceinline__ void quantized(uint32_t i, Vector v) const {
      Bytes::push(op.result(op.call_.rank, half, p, op.planes_.quantized + threadIdx.x * E::kCount),
                  v);
      row.quantized(i, v);
    }
    __device__ __forceinline__ void scale(uint32_t i, uint32_t group, float value) const {
      Word::push(op.result(op.call_.rank, half, p, op.scale_byte()), Vector{{bits_of(value)}});
      row.scale(i, group, value);
    }
  };

  __device__ __forceinline__ void finish_own(const Half& half, bool staged) {
    norm_.for_own(half.count, [&](uint64_t p) {
      if (!exists(call_.rank, half.first + p)) return;
      const uint64_t r = row(call_.rank, half.first + p);
      const auto fetch = [&](uint32_t, Share<D>& x) {
        const uint32_t i = stage_.index();
        if (!stage_.has(i) || !session_.alive()) return;
        reduce(half, p, r, staged, x);
        stage_.accumulate(x, stage_.residual(r, i));
      };
      stage_.row(fetch, Kept{*this, half, p, OwnRow(norm_, r)});
    });
  }

  __device__ __forceinline__ void gather(const Half& half) {
    norm_.for_own(half.count, [&](uint64_t p) {
#pragma unroll 1
      for (int d = 1; d < call_.world; ++d) {
        const int owner = (call_.rank + d) % call_.world;
        if (exists(owner, half.first + p)) copy_results(half, owner, p, row(owner, half.first + p));
      }
    });
  }

  __device__ __forceinline__ Vector passed(const Half& half, int owner, uint64_t p,
                                           uint32_t byte) const {
    return ptx::ld_relaxed_sys(reinterpret_cast<const Vector*>(result(owner, half, p, byte)));
  }

  __device__ __forceinline__ void copy_results(const Half& half, int owner, uint64_t p,
                                               uint64_t r) const {
    const uint32_t i = stage_.index(), vector = threadIdx.x * kVectorBytes;
    if (!stage_.has(i) || !session_.alive()) return;
    const OwnRow to(norm_, r);
    if (norm_.residual_out != nullptr)
      to.residual(i, passed(half, owner, p, planes_.residual + vector));
    if (norm_.normalized != nullptr) {
      to.normalized(i, passed(half, owner, p, planes_.normalized + vector));
    }
    if (norm_.quantized == nullptr) return;
    Vector v{};
    Bytes::poll(result(owner, half, p, planes_.quantized + threadIdx.x * E::kCount), v);
    to.quantized(i, v);
    const NormOptions& o = norm_.options;
    if (o.scale_mode == ScaleMode::tensor) return;
    const bool groups = o.scale_mode == ScaleMode::group;
    const auto width = static_cast<uint32_t>(o.quant_group_size);
    if (groups ? i * E::kCount % width != 0 : i != 0) return;
    Word::poll(result(owner, half, p, scale_byte()), v);
    to.scale(i, groups ? i * E::kCount / width : 0, float_of(v.word[0]));
  }

  const KernelCall& call_;
  const NormArguments& norm_;
  const PullArguments& pull_;
  Session<false>& session_;
  const NormPlanes planes_;
  NormStage<D, false> stage_;
};

template <DType D>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twoshot_pull(const __grid_constant__ KernelCall call,
                 const __grid_constant__ NormArguments norm,
                 const __grid_constant__ PullArguments pull) {
  Session<false> session(call);
  NormTwoshotPull<D>(session, norm, pull).run();
}

}  // namespace

// The barriers take far longer than the code around them: one kernel for all worlds.
Kernel norm_twoshot_pull(const Instance& i) {
  return for_norm_dtype(i.dtype, [&]<DType D>() { return as_kernel(twoshot_pull<D>); });
}

}  // namespace collx::cuda
