// All-reduce and norm, two-shot, by pushing, for calls whose sums are rounded and take fewer bytes
// than the results: owners push the sums, and every rank finishes every row from them.
//
// Cost: 2 (W-1)/W of the tensor on each link, like an all-reduce alone, and two link latencies.
#pragma once

#include "../transports/result_row.cuh"
#include "norm_parts.cuh"

namespace collx::cuda {

template <typename Results, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kFullBlock, Simple ? World<W>::kBlocksHeld : kRowBlocksHeld)
    norm_twoshot_push_sums_kernel(const __grid_constant__ KernelCall call,
                                  const __grid_constant__ NormArguments norm,
                                  const __grid_constant__ Epilogue... epilogue) {
  constexpr DType D = Results::kDType;
  using Parts = NormParts<Results, W, Simple>;
  using E = Elements<D>;
  using Wire = SentinelWire<D>;
  using Row = ResultRow<D, Simple>;
  constexpr int kRanks = World<W>::kRanks;
  call.touch();
  NormStage<Results, Simple> stage(norm, epilogue...);
  Session<Pieces<Simple>> session(call, norm);
  const Parts parts{session, norm, stage};
  const int world = World<W>::size(call);
  const uint32_t i = stage.index(), byte = threadIdx.x * kVectorBytes;

  const auto reduce = [&](uint32_t p, uint64_t j) {
    RowValues<D> x;
    if (!stage.has(i) || !parts.sum(p, j, x)) return;
    const Vector rounded = Wire::to_wire(E::pack(x));
    parts.template push_to_all<Wire>(p, byte, rounded);
    // This rank's own slot among the arrivals, which no other rank writes, keeps the sum for the
    // next phase.
    const PieceSlot own = parts.slot(Parts::kGather, p, byte);
    Wire::push(call.arriving + own.offset + call.rank * call.source_bytes, rounded);
  };
  const auto residual_of = [&](int owner, uint64_t j) {
    return norm.has_row(owner, j) ? stage.residual(norm.row(owner, j), i) : Vector{};
  };

  // The row of each owner at position p: all rows together if the registers are sufficient for all
  // ranks, otherwise one by one.
  const auto finish = [&](uint32_t p, uint64_t j) {
    const PieceSlot from = parts.slot(Parts::kGather, p, byte);
    if constexpr (Simple && kRanks <= 4) {
      Vector v[kRanks] = {};
      if (stage.has(i)) {
        Vector residual[kRanks];
#pragma unroll
        for (int owner = 0; owner < kRanks; ++owner) {
          residual[owner] = owner < world ? residual_of(owner, j) : Vector{};
        }
        const Arrivals<kRanks> arrivals(call, from.offset);
        const auto sums = from_slots_of<Wire>(session, Phase::gather, from.epoch, arrivals,
                                              ~(~0u << world), Vector{});
        if (sums.take(v)) sums.rearm();
#pragma unroll
        for (int owner = 0; owner < kRanks; ++owner) {
          RowValues<D> x;
          unpack<D>(v[owner], x);
          stage.accumulate(x, residual[owner]);
          v[owner] = E::pack(x);
        }
      }
      stage.rows(v, world,
                 [&](int owner) { return Row(norm, norm.row(owner, j), norm.has_row(owner, j)); });
    } else {
#pragma unroll 1
      for (int d = 0; d < world; ++d) {
        const int owner = call.rank_at(d, world);
        const auto fetch = [&](uint32_t, RowValues<D>& x) {
          if (!stage.has(i)) return;
          const Vector residual = residual_of(owner, j);
          char* slot = call.arriving + from.offset + owner * call.source_bytes;
          Vector v;
          if (!take_one<Wire>(session, Phase::gather, owner, from.epoch, slot, v)) return;
          Wire::rearm(slot);
          unpack<D>(v, x);
          stage.accumulate(x, residual);
        };
        RowValues<D> none;
        norm.has_row(owner, j) ? stage.row(fetch, Row(norm, norm.row(owner, j))) : fetch(0, none);
      }
    }
  };
  parts.run(reduce, finish);
}

}  // namespace collx::cuda
