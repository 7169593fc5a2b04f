// All-reduce and norm, two-shot, by pushing: every rank scatters its rows to their owners. An owner
// polls its slots, reduces, normalizes, quantizes, and pushes the results to all ranks, which store
// them to their outputs.
//
// Cost: (W-1)/W of the tensor on each link, then (W-1)/W of the results, and two link latencies.
#pragma once

#include "../transports/result_row.cuh"
#include "../transports/row_wire.cuh"
#include "norm_parts.cuh"

namespace collx::cuda {

/// One plane of every owner's results, as it arrives in slots.
template <typename Wire, int Ranks>
struct ArrivingPlane {
  const KernelCall& call;
  const Plane<Wire> plane;
  const PieceSlot slot;

  __device__ __forceinline__ uint32_t poll(int owner, Vector (&v)[Ranks]) const {
    return plane.has ? Wire::poll(at(owner), v[owner]) : 0;
  }
  __device__ __forceinline__ void rearm(int owner) const {
    if (plane.has) Wire::rearm(at(owner));
  }
  /// For many ranks, each iteration of a polling loop computes the address: see Arrivals.
  __device__ __forceinline__ char* at(int owner) const {
    const uint32_t offset = Ranks > 4 ? ptx::keep(slot.offset) : slot.offset;
    return call.arriving + offset + owner * call.source_bytes;
  }
};

template <typename Results, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, Simple ? World<W>::kBlocksHeld : kRowBlocksHeld)
    norm_twoshot_push_kernel(const __grid_constant__ KernelCall call,
                             const __grid_constant__ NormArguments norm,
                             const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Results::kDType;
  using Parts = NormParts<Results, W, Simple>;
  using Row = ResultRow<D, Simple>;
  constexpr int kRanks = World<W>::kRanks;
  call.touch();
  NormStage<Results, Simple> stage(norm, epilogue...);
  Session<Pieces<Simple>> session(call, norm);
  const Parts parts{session, norm, stage};
  const RowWire<D, Simple> wire(norm);
  const int world = World<W>::size(call);
  const uint32_t i = stage.index();

  const auto finish_own = [&](uint32_t p, uint64_t j) {
    const bool here = norm.has_row(call.rank, j);
    const uint64_t r = norm.row(call.rank, j);
    const auto fetch = [&](uint32_t, RowValues<D>& x) {
      if (!stage.has(i)) return;
      const Vector residual = here ? stage.residual(r, i) : Vector{};
      if (parts.sum(p, j, x)) stage.accumulate(x, residual);
    };
    const auto put = [&]<typename To>(const Plane<To>& to, Vector v) {
      parts.template push_to_all<To>(p, to.byte, to.wire.to_wire(v));
    };
    stage.row(fetch, PassingSink(wire, put, Row(norm, r, here)));
  };

  const auto is_peer = [&](int owner) { return owner < world && owner != call.rank; };
  const auto await_all = [&](auto arrived) {
    return session.patience.wait(
        Phase::gather,
        [&] {
          bool all = true;
#pragma unroll
          for (int owner = 0; owner < kRanks; ++owner) {
            if (is_peer(owner)) all &= arrived(owner);
          }
          return all;
        },
        [&] {
          int missing = call.rank;  // no rank: all have arrived since
#pragma unroll
          for (int owner = kRanks - 1; owner >= 0; --owner) {
            if (is_peer(owner) && !arrived(owner)) missing = owner;
          }
          return Blame{missing, 0, 0};
        });
  };
  const auto arriving = [&]<typename From>(const Plane<From>& plane, uint32_t p) {
    return ArrivingPlane<From, kRanks>{
        call, plane, plane.has ? parts.slot(Parts::kGather, p, plane.byte) : PieceSlot{}};
  };
  // Receives the results of every owner: all planes except one together.
  const auto drain = [&](uint32_t p, uint64_t j) {
    if (!stage.has(i)) return;
    const auto residual = arriving(wire.residual(), p);
    const auto bytes = arriving(wire.quantized(), p);
    const auto scale = arriving(wire.scale(i), p);
    Vector r[kRanks], q[kRanks], s[kRanks];
    const auto arrived = [&](int owner) {
      return max(max(residual.poll(owner, r), bytes.poll(owner, q)), scale.poll(owner, s)) != ~0u;
    };
    if (await_all(arrived)) {
#pragma unroll
      for (int owner = 0; owner < kRanks; ++owner) {
        if (!is_peer(owner)) continue;
        residual.rearm(owner);
        bytes.rearm(owner);
        scale.rearm(owner);
        if (!norm.has_row(owner, j)) continue;
        const Row to(norm, norm.row(owner, j));
        if (residual.plane.has) to.residual(i, r[owner]);
        if (bytes.plane.has) to.quantized(i, bytes.plane.wire.from_wire(q[owner]));
        if (scale.plane.has) to.scale(i, float_of(s[owner].word[0]));
      }
    }
    if (norm.normalized == nullptr) return;
    const auto normalized = arriving(wire.normalized(), p);
    if (!await_all([&](int owner) { return normalized.poll(owner, r) != ~0u; })) return;
#pragma unroll
    for (int owner = 0; owner < kRanks; ++owner) {
      if (!is_peer(owner)) continue;
      normalized.rearm(owner);
      if (norm.has_row(owner, j)) Row(norm, norm.row(owner, j)).normalized(i, r[owner]);
    }
  };
  parts.run(finish_own, drain);
}

}  // namespace collx::cuda
