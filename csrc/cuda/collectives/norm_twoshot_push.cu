// All-reduce and norm, two-shot, by pushing: every rank scatters its rows to their owners; an owner
// polls, reduces, normalises, quantises, and pushes what comes out to all; everyone drains. Where
// the sums are fewer bytes than the results, and rounded already, the owner pushes those and every
// rank goes on from there.
//
// Costs (W-1)/W of the tensor on each link, then (W-1)/W of what is passed on, and two flights.
#include "../stages/norm.cuh"
#include "../transports/pieces.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

enum Stage { kScatter, kGather };

template <DType D, int W, bool Simple>
class NormTwoshot {
  using S = SentinelSlots<D>;
  using E = Elements<D>;
  using Bytes = NarrowSlots<E::kCount / 4>;  // a byte for each element of a vector
  using Word = NarrowSlots<1>;
  using OwnRow = ResultRow<D, Simple>;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ NormTwoshot(Session<Simple>& session, const NormArguments& norm)
      : session_(session),
        call_(session.call),
        norm_(norm),
        planes_(norm.shape, norm.residual_out != nullptr, norm.normalised != nullptr,
                dtype_size(D)),
        world_(World<W>::size(call_)),
        parts_(norm.rows, world_),
        stage_(norm),
        pieces_(call_, norm.shape, parts_.largest()) {}

  __device__ void run() {
    const uint64_t rows = parts_.largest();
    const uint32_t most = norm_.shape.rows_per_use;
    stage_.prefetch();
    for (uint64_t done = 0; done < rows; done += most) {
      const uint64_t n = rows - done < most ? rows - done : most;
      if (done > 0) pieces_.next();
      pieces_.for_own(n, [&](uint32_t p) { scatter(p, done + p); });
      if (norm_.shape.passes_sums) {
        pieces_.for_own(n, [&](uint32_t p) { reduce(p, done + p); });
        pieces_.for_own(n, [&](uint32_t p) { finish_all(p, done + p); });
      } else {
        pieces_.for_own(n, [&](uint32_t p) { finish_own(p, done + p); });
        pieces_.for_own(n, [&](uint32_t p) { drain(p, done + p); });
      }
    }
    pieces_.finish(session_);
  }

 private:
  __device__ __forceinline__ int peer(int distance) const { return (call_.rank + distance) % world_; }
  __device__ __forceinline__ bool exists(int owner, uint64_t j) const {
    return j < parts_.part(owner).count;
  }
  /// Of the whole tensor, row j of a rank's part.
  __device__ __forceinline__ uint64_t row(int owner, uint64_t j) const {
    return parts_.part(owner).start + j;
  }

  /// A filler where a part is shorter than the largest, since every use of a tile carries a word
  /// between every two ranks. Here and in all that follows: such rows are exchanged and not stored.
  __device__ __forceinline__ Vector load(int owner, uint64_t j, uint32_t i) const {
    if (!exists(owner, j)) return {};
    const char* input = static_cast<const char*>(call_.input);
    return VectorTensor<dtype_size(D), Simple>(
               input + row(owner, j) * norm_.cols * dtype_size(D), norm_.cols)
        .load(i);
  }

  __device__ __forceinline__ void scatter(uint32_t p, uint64_t j) const {
    const uint32_t i = stage_.index();
    if (!stage_.has(i)) return;
    const PieceSlot to = pieces_.slot(kScatter, p, threadIdx.x * kVectorBytes);
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) v[d] = load(peer(d), j, i);
    }
    if (!session_.alive()) return;
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) S::push(call_.outgoing[d] + to.offset, S::sendable(v[d]), to.epoch);
    }
  }

  /// The sum of this thread's vector in the row of this rank's part.
  __device__ __forceinline__ bool sum(uint32_t p, uint64_t j, Share<D>& x) {
    const PieceSlot from = pieces_.slot(kScatter, p, threadIdx.x * kVectorBytes);
    const Vector own = S::sendable(load(call_.rank, j, stage_.index()));
    const Arrivals<kRanks> arrivals(call_, from.offset);
    Vector v[kRanks];
    if (!await_vectors<S>(session_, Phase::arrival, world_, from.epoch, own, arrivals, v)) {
      return false;
    }
    arrivals.template rearm<S>(world_);
    fold<D>(x, v, world_, [](float a, float b) { return a + b; });
    return true;
  }

  template <typename T>
  __device__ __forceinline__ void push_to_all(uint32_t p, uint32_t byte, Vector v) const {
    if (!session_.alive()) return;
    const PieceSlot to = pieces_.slot(kGather, p, byte);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) T::push(call_.outgoing[d] + to.offset, v, to.epoch);
    }
  }

  // Results pass.

  /// A sink that pushes what comes to all ranks, and stores it here where the row exists.
  struct Everywhere {
    const NormTwoshot& op;
    const uint32_t p;
    const bool exists;
    const OwnRow row;

    __device__ __forceinline__ void residual(uint32_t i, Vector v) const {
      op.push_to_all<S>(p, op.planes_.residual + threadIdx.x * kVectorBytes, S::sendable(v));
      if (exists) row.residual(i, v);
    }
    __device__ __forceinline__ void normalised(uint32_t i, Vector v) const {
      op.push_to_all<S>(p, op.planes_.normalised + threadIdx.x * kVectorBytes, S::sendable(v));
      if (exists) row.normalised(i, v);
    }
    __device__ __forceinline__ void quantised(uint32_t i, Vector v) const {
      op.push_to_all<Bytes>(p, op.planes_.quantised + threadIdx.x * E::kCount,
                            disguised(v, op.norm_.options.quantisation));
      if (exists) row.quantised(i, v);
    }
    __device__ __forceinline__ void scale(uint32_t i, uint32_t group, float value) const {
      op.push_to_all<Word>(p, op.scale_byte(), Vector{{bits_of(value)}});
      if (exists) row.scale(i, group, value);
    }
  };

  /// Where the scale stands that this thread passes on, if it does so.
  __device__ __forceinline__ uint32_t scale_byte() const {
    const auto group = static_cast<uint32_t>(norm_.options.group_size);
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

  /// `store(row, v)` with what every owner has passed on at that byte of the piece.
  template <typename T, typename Store>
  __device__ __forceinline__ void drain(uint32_t p, uint64_t j, uint32_t byte, Store store) {
    const PieceSlot from = pieces_.slot(kGather, p, byte);
    const Arrivals<kRanks> arrivals(call_, from.offset);
    Vector v[kRanks];
    if (!await_vectors<T>(session_, Phase::gather, world_, from.epoch, Vector{}, arrivals, v)) {
      return;
    }
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (owner >= world_ || owner == call_.rank) continue;
      T::rearm(arrivals.slot[owner]);
      if (exists(owner, j)) store(OwnRow(norm_, row(owner, j)), v[owner]);
    }
  }

  __device__ __forceinline__ void drain(uint32_t p, uint64_t j) {
    const uint32_t i = stage_.index(), vector = threadIdx.x * kVectorBytes;
    if (!stage_.has(i)) return;
    if (norm_.residual_out != nullptr) {
      drain<S>(p, j, planes_.residual + vector,
               [&](const OwnRow& to, Vector v) { to.residual(i, v); });
    }
    if (norm_.normalised != nullptr) {
      drain<S>(p, j, planes_.normalised + vector,
               [&](const OwnRow& to, Vector v) { to.normalised(i, v); });
    }
    if (norm_.quantised == nullptr) return;
    const NormOptions& o = norm_.options;
    drain<Bytes>(p, j, planes_.quantised + threadIdx.x * E::kCount,
                 [&](const OwnRow& to, Vector v) { to.quantised(i, disguised(v, o.quantisation)); });
    if (o.scale_mode == ScaleMode::tensor) return;
    const bool groups = !Simple && o.scale_mode == ScaleMode::group;
    const auto width = static_cast<uint32_t>(groups ? o.group_size : 0);
    if (groups ? i * E::kCount % width != 0 : i != 0) return;
    drain<Word>(p, j, scale_byte(), [&](const OwnRow& to, Vector v) {
      to.scale(i, groups ? i * E::kCount / width : 0, float_of(v.word[0]));
    });
  }

  // Sums pass.

  __device__ __forceinline__ void reduce(uint32_t p, uint64_t j) {
    Share<D> x;
    if (!stage_.has(stage_.index()) || !sum(p, j, x)) return;
    const Vector rounded = S::sendable(E::pack(x));
    push_to_all<S>(p, threadIdx.x * kVectorBytes, rounded);
    // The own place among the arrivals, which nobody else writes, keeps it for the next phase.
    const PieceSlot own = pieces_.slot(kGather, p, threadIdx.x * kVectorBytes);
    S::push(call_.arriving + own.offset + call_.rank * call_.source_bytes, rounded, own.epoch);
  }

  __device__ __forceinline__ void finish_all(uint32_t p, uint64_t j) {
#pragma unroll 1
    for (int d = 0; d < world_; ++d) {
      const int owner = peer(d);
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
  }
  __device__ __forceinline__ bool await_one(int owner, const char* slot, Vector& v) {
    return session_.patience.wait(
        Phase::gather, [&] { return S::poll(slot, v, 0) != ~0u; },
        [&] {
          return Blame{owner, 0, 0};
        });
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const NormArguments& norm_;
  const NormPlanes planes_;
  const int world_;
  const Partition parts_;
  NormStage<D, Simple> stage_;
  Pieces pieces_;
};

template <DType D, int W, bool Simple>
__global__ void __launch_bounds__(512, 2)
    twoshot_push(const __grid_constant__ KernelCall call, const __grid_constant__ NormArguments norm) {
  Session<Simple> session(call);
  NormTwoshot<D, W, Simple>(session, norm).run();
}

struct Family {
  template <DType D, int W, bool Simple>
  static Kernel kernel() {
    return reinterpret_cast<Kernel>(twoshot_push<D, W, Simple>);
  }
};

}  // namespace

Kernel norm_twoshot_push(DType dtype, int world, bool simple) {
  return find_norm_kernel<Family>(dtype, world, simple);
}

}  // namespace collx::cuda
