// All-reduce and norm, two-shot, by pushing, where the sums are rounded and fewer bytes than the
// results: owners push those, and every rank finishes every row from there.
//
// Costs 2 (W-1)/W of the tensor on each link, as an all-reduce alone, and two flights.
#include "norm_parts.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W, bool Simple>
class NormTwoshotSums : NormParts<D, W, Simple> {
  using Base = NormParts<D, W, Simple>;
  using Base::call_;
  using Base::exists;
  using Base::kGather;
  using Base::kRanks;
  using Base::norm_;
  using Base::peer;
  using Base::pieces_;
  using Base::row;
  using Base::session_;
  using Base::stage_;
  using Base::sum;
  using Base::world_;
  using typename Base::E;
  using typename Base::OwnRow;
  using typename Base::S;

 public:
  __device__ NormTwoshotSums(Session<Simple>& session, const NormArguments& norm,
                             NormStage<D, Simple>& stage)
      : Base(session, norm, stage) {}

  __device__ void run() {
    this->run_uses([&](uint32_t p, uint64_t j) { reduce(p, j); },
                   [&](uint32_t p, uint64_t j) { finish_all(p, j); });
  }

 private:
  __device__ __forceinline__ void reduce(uint32_t p, uint64_t j) {
    Share<D> x;
    if (!stage_.has(stage_.index()) || !sum(p, j, x)) return;
    const Vector rounded = S::sendable(E::pack(x));
    this->template push_to_all<S>(p, threadIdx.x * kVectorBytes, rounded);
    // The own place among the arrivals, which nobody else writes, keeps it for the next phase.
    const PieceSlot own = pieces_.slot(kGather, p, threadIdx.x * kVectorBytes);
    S::push(call_.arriving + own.offset + call_.rank * call_.source_bytes, rounded);
  }

  /// The row that each owner has at position p, one by one, or at once.
  __device__ __forceinline__ void finish_all(uint32_t p, uint64_t j) {
    if constexpr (Simple) {
      Vector v[kRanks] = {};
      finish_together(p, j, v);
    } else {
#pragma unroll 1
      for (int d = 0; d < world_; ++d) finish_one(p, j, peer(d));
    }
  }
  __device__ __forceinline__ void finish_together(uint32_t p, uint64_t j, Vector (&v)[kRanks]) {
    const uint32_t i = stage_.index();
    if (stage_.has(i)) {
      Vector residual[kRanks];
#pragma unroll
      for (int owner = 0; owner < kRanks; ++owner) {
        const bool here = owner < world_ && exists(owner, j);
        residual[owner] = here ? stage_.residual(row(owner, j), i) : Vector{};
      }
      const PieceSlot from = pieces_.slot(kGather, p, threadIdx.x * kVectorBytes);
      const Arrivals<kRanks> arrivals(call_, from.offset);
      const auto all = [&](int owner) { return owner < world_; };
      if (await_vectors<S>(session_, Phase::gather, from.epoch, Vector{}, arrivals, v, all)) {
        arrivals.template rearm<S>(world_);
      }
#pragma unroll
      for (int owner = 0; owner < kRanks; ++owner) {
        Share<D> x;
#pragma unroll
        for (int e = 0; e < E::kCount; ++e) x[e] = E::get(v[owner], e);
        stage_.accumulate(x, residual[owner]);
        v[owner] = E::pack(x);
      }
    }
    stage_.rows(v, world_, [&](int owner) {
      return RowIfThere{exists(owner, j), OwnRow(norm_, row(owner, j))};
    });
  }
  /// A sink that drops the rows that a part does not have.
  struct RowIfThere {
    const bool exists;
    const OwnRow row;
    __device__ __forceinline__ void residual(uint32_t i, Vector v) const {
      if (exists) row.residual(i, v);
    }
    __device__ __forceinline__ void normalized(uint32_t i, Vector v) const {
      if (exists) row.normalized(i, v);
    }
    __device__ __forceinline__ void quantized(uint32_t i, Vector v) const {
      if (exists) row.quantized(i, v);
    }
    __device__ __forceinline__ void scale(uint32_t i, uint32_t group, float value) const {
      if (exists) row.scale(i, group, value);
    }
  };

  __device__ __forceinline__ void finish_one(uint32_t p, uint64_t j, int owner) {
    const bool here = exists(owner, j);
    const uint64_t r = row(owner, j);
    const auto fetch = [&](uint32_t, Share<D>& x) {
      const uint32_t i = stage_.index();
      if (!stage_.has(i)) return;
      const PieceSlot from = pieces_.slot(kGather, p, threadIdx.x * kVectorBytes);
      const Vector residual = here ? stage_.residual(r, i) : Vector{};
      char* slot = call_.arriving + from.offset + owner * call_.source_bytes;
      Vector v;
      if (!await_one(owner, slot, v)) return;
      S::rearm(slot);
#pragma unroll
      for (int e = 0; e < E::kCount; ++e) x[e] = E::get(v, e);
      stage_.accumulate(x, residual);
    };
    if (here) {
      stage_.row(fetch, OwnRow(norm_, r));
    } else {
      Share<D> none;
      fetch(0, none);
    }
  }
  __device__ __forceinline__ bool await_one(int owner, const char* slot, Vector& v) {
    return session_.patience.wait(
        Phase::gather, [&] { return S::poll(slot, v) != ~0u; },
        [&] {
          return Blame{owner, 0, 0};
        });
  }
};

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twoshot_push_sums(const __grid_constant__ KernelCall call,
                      const __grid_constant__ NormArguments norm) {
  call.touch();
  NormStage<D, Simple> stage(norm);
  Session<Simple> session(call);
  NormTwoshotSums<D, W, Simple>(session, norm, stage).run();
}

}  // namespace

Kernel norm_twoshot_push_sums(const Instance& i) {
  return for_norm(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(twoshot_push_sums<D, W, Simple>); });
}

}  // namespace collx::cuda
