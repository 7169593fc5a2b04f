// All-reduce and norm, two-shot, by pushing: every rank scatters its rows to their owners; an owner
// polls, reduces, normalizes, quantizes, and pushes what comes out to all; everyone drains.
//
// Costs (W-1)/W of the tensor on each link, then (W-1)/W of the results, and two flights.
#include "norm_parts.cuh"

namespace collx::cuda {
namespace {

template <DType D, int W, bool Simple>
class NormTwoshot : NormParts<D, W, Simple> {
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
  using Bytes = NarrowSlots<E::kCount / 4>;  // a byte for each element of a vector
  using Word = NarrowSlots<1>;

 public:
  __device__ NormTwoshot(Session<Simple>& session, const NormArguments& norm,
                         NormStage<D, Simple>& stage)
      : Base(session, norm, stage),
        planes_(norm.shape, norm.residual_out != nullptr, norm.normalized != nullptr,
                dtype_size(D)) {}

  __device__ void run() {
    this->run_uses([&](uint32_t p, uint64_t j) { finish_own(p, j); },
                   [&](uint32_t p, uint64_t j) { drain(p, j); });
  }

 private:
  /// A sink that pushes what comes to all ranks, and stores it here where the row exists.
  struct Everywhere {
    const NormTwoshot& op;
    const uint32_t p;
    const bool exists;
    const OwnRow row;

    __device__ __forceinline__ void residual(uint32_t i, Vector v) const {
      op.template push_to_all<S>(p, op.planes_.residual + threadIdx.x * kVectorBytes,
                                 S::sendable(v));
      if (exists) row.residual(i, v);
    }
    __device__ __forceinline__ void normalized(uint32_t i, Vector v) const {
      op.template push_to_all<S>(p, op.planes_.normalized + threadIdx.x * kVectorBytes,
                                 S::sendable(v));
      if (exists) row.normalized(i, v);
    }
    __device__ __forceinline__ void quantized(uint32_t i, Vector v) const {
      op.template push_to_all<Bytes>(p, op.planes_.quantized + threadIdx.x * E::kCount,
                                     disguised(v, op.norm_.options.quantization));
      if (exists) row.quantized(i, v);
    }
    __device__ __forceinline__ void scale(uint32_t i, uint32_t group, float value) const {
      op.template push_to_all<Word>(p, op.scale_byte(), Vector{{bits_of(value)}});
      if (exists) row.scale(i, group, value);
    }
  };

  /// Where the scale stands that this thread passes on, if it does so.
  __device__ __forceinline__ uint32_t scale_byte() const {
    const auto group = static_cast<uint32_t>(norm_.options.quant_group_size);
    const bool groups = !Simple && norm_.options.scale_mode == ScaleMode::group;
    return planes_.scales + (groups ? threadIdx.x * E::kCount / group * 4 : 0);
  }

  __device__ __forceinline__ void finish_own(uint32_t p, uint64_t j) {
    const bool here = exists(call_.rank, j);
    const uint64_t r = row(call_.rank, j);
    const auto fetch = [&](uint32_t, Share<D>& x) {
      const uint32_t i = stage_.index();
      if (!stage_.has(i)) return;
      const Vector residual = here ? stage_.residual(r, i) : Vector{};
      if (sum(p, j, x)) stage_.accumulate(x, residual);
    };
    stage_.row(fetch, Everywhere{*this, p, here, OwnRow(norm_, r)});
  }

  /// Waits for what every owner has passed on, all planes but one at once.
  __device__ __forceinline__ void drain(uint32_t p, uint64_t j) {
    const uint32_t i = stage_.index(), vector = threadIdx.x * kVectorBytes;
    if (!stage_.has(i)) return;
    const NormOptions& o = norm_.options;
    const bool groups = !Simple && o.scale_mode == ScaleMode::group;
    const auto width = static_cast<uint32_t>(groups ? o.quant_group_size : 0);
    const bool first = groups ? i * E::kCount % width == 0 : i == 0;
    const Plane<S> residual(*this, norm_.residual_out != nullptr, p, planes_.residual + vector);
    const Plane<Bytes> bytes(*this, norm_.quantized != nullptr, p,
                             planes_.quantized + threadIdx.x * E::kCount);
    const Plane<Word> scale(
        *this, norm_.quantized != nullptr && o.scale_mode != ScaleMode::tensor && first, p,
        scale_byte());
    Vector r[kRanks], q[kRanks], s[kRanks];
    const auto arrived = [&](int owner) {
      return max(max(residual.poll(owner, r), bytes.poll(owner, q)), scale.poll(owner, s)) != ~0u;
    };
    if (await_all(arrived)) {
#pragma unroll
      for (int owner = 0; owner < kRanks; ++owner) {
        if (owner >= world_ || owner == call_.rank) continue;
        residual.rearm(owner);
        bytes.rearm(owner);
        scale.rearm(owner);
        if (!exists(owner, j)) continue;
        const OwnRow to(norm_, row(owner, j));
        if (residual.is()) to.residual(i, r[owner]);
        if (bytes.is()) to.quantized(i, disguised(q[owner], o.quantization));
        if (scale.is()) to.scale(i, groups ? i * E::kCount / width : 0, float_of(s[owner].word[0]));
      }
    }
    if (norm_.normalized == nullptr) return;
    const Plane<S> normalized(*this, true, p, planes_.normalized + vector);
    if (!await_all([&](int owner) { return normalized.poll(owner, r) != ~0u; })) return;
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner >= world_ || owner == call_.rank) continue;
      normalized.rearm(owner);
      if (exists(owner, j)) OwnRow(norm_, row(owner, j)).normalized(i, r[owner]);
    }
  }

  /// What this thread drains of one kind of result, if the call has it.
  template <typename T>
  class Plane {
   public:
    __device__ __forceinline__ Plane(const NormTwoshot& op, bool is, uint32_t p, uint32_t byte)
        : call_(op.call_), is_(is), slot_(is ? op.pieces_.slot(kGather, p, byte) : PieceSlot{}) {}

    __device__ __forceinline__ bool is() const { return is_; }
    __device__ __forceinline__ uint32_t poll(int owner, Vector (&v)[kRanks]) const {
      return is_ ? T::poll(at(owner), v[owner]) : 0;
    }
    __device__ __forceinline__ void rearm(int owner) const {
      if (is_) T::rearm(at(owner));
    }

   private:
    __device__ __forceinline__ char* at(int owner) const {
      return call_.arriving + slot_.offset + owner * call_.source_bytes;
    }
    const KernelCall& call_;
    const bool is_;
    const PieceSlot slot_;
  };

  /// Until `arrived(owner)` of every owner.
  template <typename Arrived>
  __device__ __forceinline__ bool await_all(Arrived arrived) {
    return session_.patience.wait(
        Phase::gather,
        [&] {
          bool all = true;
#pragma unroll
          for (int owner = 0; owner < kRanks; ++owner) {
            if (owner < world_ && owner != call_.rank) all &= arrived(owner);
          }
          return all;
        },
        [&] {
          int missing = call_.rank;  // nobody: all have come since
#pragma unroll
          for (int owner = kRanks - 1; owner >= 0; --owner) {
            if (owner < world_ && owner != call_.rank && !arrived(owner)) missing = owner;
          }
          return Blame{missing, 0, 0};
        });
  }

  const NormPlanes planes_;
};

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    twoshot_push(const __grid_constant__ KernelCall call,
                 const __grid_constant__ NormArguments norm) {
  call.touch();
  NormStage<D, Simple> stage(norm);
  Session<Simple> session(call);
  NormTwoshot<D, W, Simple>(session, norm, stage).run();
}

}  // namespace

Kernel norm_twoshot_push(const Instance& i) {
  return for_norm(
      i, [&]<DType D, int W, bool Simple>() { return as_kernel(twoshot_push<D, W, Simple>); });
}

}  // namespace collx::cuda
