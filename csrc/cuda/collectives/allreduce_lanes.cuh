// All-reduce, two-shot, by chunks in lanes: every rank scatters its tensor to the owners of its
// parts; an owner reduces and sends the result to all, into their outputs where these are
// symmetric, else into slots, from which each rank stores it.
//
// Costs 2 (W-1)/W of the tensor on each link.
#pragma once

#include "../../protocol/partition.h"
#include "../stages/combine.cuh"
#include "../transports/lanes.cuh"

namespace collx::cuda {

/// The vectors of the first `world` ranks, from those by distance.
template <int Ranks>
struct ByRank {
  Vector of[Ranks];
};
template <int Ranks>
__device__ __forceinline__ ByRank<Ranks> by_rank(const Vector (&by_distance)[Ranks], int rank,
                                                 int world) {
  ByRank<Ranks> v;
#pragma unroll
  for (int r = 0; r < Ranks; ++r) {
    v.of[r] = by_distance[0];
#pragma unroll
    for (int d = 1; d < Ranks; ++d) {
      const bool is = d < world && (rank + d == r || rank + d == r + world);
#pragma unroll
      for (int w = 0; w < 4; ++w) v.of[r].word[w] = is ? by_distance[d].word[w] : v.of[r].word[w];
    }
  }
  return v;
}

/// `Simple`: a sum of whole vectors.
template <typename Stage, int W, bool Simple, typename... Epilogue>
__global__ void __launch_bounds__(kLaneBlock, 2)
    allreduce_lanes_kernel(const __grid_constant__ KernelCall call,
                           const __grid_constant__ LaneArguments lanes,
                           const __grid_constant__ Epilogue... epilogue) {
  constexpr int kRanks = World<W>::kRanks, kAtOnce = 8, kReducedAtOnce = kRanks == 2 ? 4 : 1;
  Session<Lanes<W>> session(call, lanes);
  const int world = World<W>::size(call), rank = call.rank;
  const DenseTensor<Stage::kElementBytes, Simple> input(call.input, call.numel);
  const auto output = Stage::template output<Simple>(call.output, call.numel, epilogue...);
  using Ahead = typename decltype(output)::Ahead;
  const Partition parts(input.vectors(), world);

  const auto scatter = [&](const Team& team, const Chunk& chunk, auto ready, auto slot) {
    bool asked = false;
#pragma unroll 1
    for (int d = 1; d < world; ++d) {
      const Part part = parts.part(call.rank_at(d, world));
      const uint32_t count = chunk.count(part);
      Vector* const to = slot(d);
      for (uint32_t k = team.thread; k < count || !asked; k += kAtOnce * team.threads) {
        Vector v[kAtOnce];
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const uint32_t i = k + u * team.threads;
          if (i < count) v[u] = input.load(part.start + chunk.first + i);
        }
        if (!asked && !ready()) return false;
        asked = true;
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const uint32_t i = k + u * team.threads;
          if (i < count) ptx::st_relaxed_sys(to + i, v[u]);
        }
      }
    }
    return true;
  };

  const auto reduce = [&](const Team& team, const Chunk& chunk, auto ready, auto from, auto slot) {
    const Part part = parts.part(rank);
    const uint32_t count = chunk.count(part);
    const uint64_t first = part.start + chunk.first;
    const auto target = [&](int d) {
      return session.transport.direct() ? reinterpret_cast<Vector*>(lanes.output[d]) + first
                                        : slot(d);
    };
    // Of one peer the addresses are kept. Of many they would take the registers of the vectors.
    const Vector* const from_one = from(1);
    Vector* const to_one = target(1);
    const auto come = [&](int d) { return kRanks == 2 ? from_one : from(d); };
    const auto to = [&](int d) { return kRanks == 2 ? to_one : target(d); };
    bool asked = false;
    for (uint32_t k = team.thread; k < count || !asked; k += kReducedAtOnce * team.threads) {
      Vector v[kReducedAtOnce][kRanks];  // by distance, the own one first
      Ahead ahead[kReducedAtOnce];
#pragma unroll
      for (int u = 0; u < kReducedAtOnce; ++u) {
        const uint32_t i = k + u * team.threads;
        if (i >= count) continue;
        v[u][0] = input.load(first + i);
        ahead[u] = output.ahead(first + i);
      }
      if (!asked && !ready()) return false;
      asked = true;
#pragma unroll
      for (int u = 0; u < kReducedAtOnce; ++u) {
        const uint32_t i = k + u * team.threads;
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
          if (d < world && i < count) v[u][d] = ptx::ld_relaxed_sys(come(d) + i);
        }
      }
#pragma unroll
      for (int u = 0; u < kReducedAtOnce; ++u) {
        const uint32_t i = k + u * team.threads;
        const Vector sum =
            Stage::template reduced<Simple>(call, world, by_rank(v[u], rank, world).of);
        if (i >= count) continue;
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
          if (d < world) ptx::st_relaxed_sys(to(d) + i, sum);
        }
        output.store(first + i, sum, ahead[u]);
      }
    }
    return true;
  };

  const auto gather = [&](const Team& team, const Chunk& chunk, auto ready, auto slot) {
    if (!ready()) return false;
#pragma unroll 1
    for (int d = 1; d < world; ++d) {
      const Part part = parts.part(call.rank_at(d, world));
      const uint32_t count = chunk.count(part);
      const uint64_t first = part.start + chunk.first;
      const Vector* const from = slot(d);
      for (uint32_t k = team.thread; k < count; k += kAtOnce * team.threads) {
        Vector v[kAtOnce];
        Ahead ahead[kAtOnce];
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const uint32_t i = k + u * team.threads;
          if (i >= count) continue;
          ahead[u] = output.ahead(first + i);
          v[u] = ptx::ld_relaxed_sys(from + i);
        }
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const uint32_t i = k + u * team.threads;
          if (i < count) output.store(first + i, v[u], ahead[u]);
        }
      }
    }
    return true;
  };

  session.transport.run(session.patience, scatter, reduce, gather);
}

}  // namespace collx::cuda
