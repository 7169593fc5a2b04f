// The operations of a lane on a chunk: store it into a slot of a peer, take it out of a slot, or
// reduce the chunks of all ranks.
//
// `ready()` is called once, after the first loads have started. If it returns false, nothing is
// stored and the result is false.
#pragma once

#include "../arguments/vectors.cuh"
#include "lanes.cuh"

namespace collx::cuda {

/// Reorders the vectors of the first `world` ranks from distance order to rank order.
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

/// `asked`: whether ready() has already returned true for this chunk.
template <typename Input, typename Ready>
__device__ __forceinline__ bool send_chunk(const RoleThreads& role, const Input& input,
                                           const Chunk& chunk, Vector* to, Ready ready,
                                           bool& asked) {
  constexpr int kAtOnce = 8;
  for (uint32_t k = role.thread; k < chunk.count || !asked; k += kAtOnce * role.threads) {
    Vector v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = k + u * role.threads;
      if (i < chunk.count) v[u] = input.begin_load(chunk.first + i);
    }
    if (!asked && !ready()) return false;
    asked = true;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = k + u * role.threads;
      if (i < chunk.count) ptx::st_relaxed_sys(to + i, input.end_load(chunk.first + i, v[u]));
    }
  }
  return true;
}

/// Stores a chunk. `load(k)`: vector k of the chunk.
template <typename Output, typename Load>
__device__ __forceinline__ void store_chunk(const RoleThreads& role, const Output& output,
                                            const Chunk& chunk, Load load) {
  constexpr int kAtOnce = 8;
  for (uint32_t k = role.thread; k < chunk.count; k += kAtOnce * role.threads) {
    Vector v[kAtOnce];
    typename Output::Ahead ahead[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = k + u * role.threads;
      if (i >= chunk.count) continue;
      ahead[u] = output.ahead(chunk.first + i);
      v[u] = load(i);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = k + u * role.threads;
      if (i < chunk.count) output.store(chunk.first + i, v[u], ahead[u]);
    }
  }
}

/// Stores a chunk that has arrived in a slot.
template <typename Output>
__device__ __forceinline__ void take_chunk(const RoleThreads& role, const Output& output,
                                           const Chunk& chunk, const Vector* slot) {
  store_chunk(role, output, chunk, [&](uint32_t k) { return ptx::ld_relaxed_sys(slot + k); });
}

/// Chunk i of a message. `Simple`: see Run.
template <bool Simple, typename Transport>
__device__ __forceinline__ Chunk chunk_of(const Transport& transport, const LaneChunks& chunks,
                                          uint32_t i, const Message& m) {
  return transport.chunk(chunks, i, Run<Simple>(m).vectors());
}

using Messages = const Message (&)[kMaxCudaRanks];

/// Stores chunk i of the message to each peer into a slot of that peer, `slot(d)`.
template <bool Simple, typename Transport, typename Ready, typename Slot>
__device__ __forceinline__ bool send_chunks(const RoleThreads& role, const Transport& transport,
                                            int world, Messages from, ByDistance chunks, uint32_t i,
                                            Ready ready, Slot slot) {
  bool asked = false;
#pragma unroll 1
  for (int d = 1; d < world; ++d) {
    const Chunk chunk = chunk_of<Simple>(transport, chunks[d], i, from[d]);
    if (!send_chunk(role, Run<Simple>(from[d]), chunk, slot(d), ready, asked)) return false;
  }
  return true;
}

/// Stores chunk i of the message from each peer, which has arrived in `slot(d)`.
template <bool Simple, typename Transport, typename Slot>
__device__ __forceinline__ void take_chunks(const RoleThreads& role, const Transport& transport,
                                            int world, Messages to, ByDistance chunks, uint32_t i,
                                            Slot slot) {
#pragma unroll 1
  for (int d = 1; d < world; ++d) {
    const Chunk chunk = chunk_of<Simple>(transport, chunks[d], i, to[d]);
    take_chunk(role, Run<Simple>(to[d]), chunk, slot(d));
  }
}

/// Copies a chunk within this rank.
template <typename Tensor>
__device__ __forceinline__ void copy_chunk(const RoleThreads& role, const Tensor& from,
                                           const Tensor& to, const Chunk& chunk) {
  store_chunk(role, to, chunk, [&](uint32_t k) { return from.load(chunk.first + k); });
}

/// Copies the chunks of a message within this rank.
template <typename Transport, typename Tensor>
__device__ __forceinline__ void copy_chunks(const RoleThreads& role, const Transport& transport,
                                            const LaneChunks& chunks, const Tensor& from,
                                            const Tensor& to) {
  for (uint32_t i = 0; i < chunks.count; ++i) {
    copy_chunk(role, from, to, transport.chunk(chunks, i, to.vectors()));
  }
}

/// Sets the chunks of a message to zero.
template <typename Transport, typename Tensor>
__device__ __forceinline__ void clear_chunks(const RoleThreads& role, const Transport& transport,
                                             const LaneChunks& chunks, const Tensor& to) {
  for (uint32_t i = 0; i < chunks.count; ++i) {
    store_chunk(role, to, transport.chunk(chunks, i, to.vectors()),
                [](uint32_t) { return Vector{}; });
  }
}

/// `from(d)`: the slot of the peer at distance d. `Sends`: the result also goes to that peer, at
/// `to(d)`.
template <typename Stage, int W, bool Simple, bool Sends, typename Input, typename Output,
          typename Ready, typename From, typename To>
__device__ __forceinline__ bool reduce_chunk(const KernelCall& call, int world,
                                             const RoleThreads& role, const Input& input,
                                             const Output& output, const Chunk& chunk, Ready ready,
                                             From from, To to) {
  constexpr int kRanks = World<W>::kRanks, kAtOnce = kRanks > 2 ? 1 : 4;
  // The address of a single peer is kept. The addresses of several peers would take registers that
  // the vectors need.
  const Vector* const from_one = from(1);
  Vector* const to_one = to(1);
  bool asked = false;
  for (uint32_t k = role.thread; k < chunk.count || !asked; k += kAtOnce * role.threads) {
    Vector v[kAtOnce][kRanks];  // by distance; this rank's own vector is first
    typename Output::Ahead ahead[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = k + u * role.threads;
      if (i >= chunk.count) continue;
      v[u][0] = input.load(chunk.first + i);
      ahead[u] = output.ahead(chunk.first + i);
    }
    if (!asked && !ready()) return false;
    asked = true;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = k + u * role.threads;
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        if (d < world && i < chunk.count) {
          v[u][d] = ptx::ld_relaxed_sys((kRanks == 2 ? from_one : from(d)) + i);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t i = k + u * role.threads;
      const Vector sum =
          Stage::template reduced<Simple>(call, world, by_rank(v[u], call.rank, world).of);
      if (i >= chunk.count) continue;
      if constexpr (Sends) {
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
          if (d < world) ptx::st_relaxed_sys((kRanks == 2 ? to_one : to(d)) + i, sum);
        }
      }
      output.store(chunk.first + i, sum, ahead[u]);
    }
  }
  return true;
}

}  // namespace collx::cuda
