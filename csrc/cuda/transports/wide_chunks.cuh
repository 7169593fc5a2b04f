// The operations on chunks by the roles of a block with several lanes: see wide_lanes.cuh.
#pragma once

#include "chunks.cuh"
#include "wide_lanes.cuh"

namespace collx::cuda {

__device__ __forceinline__ Vector* vectors_at(void* data, uint64_t first) {
  return static_cast<Vector*>(data) + first;
}

template <typename Transport>
struct WideChunks {
  const KernelCall& call;
  Transport& transport;
  const int world;

  /// Starts the load of a chunk into a stage, and sets the number of bytes that the stage waits
  /// for.
  __device__ __forceinline__ void load(const void* data, const Chunk& chunk, uint32_t to,
                                       ptx::TransactionBarrier* barrier) const {
    const uint32_t bytes = chunk.count * kVectorBytes;
    ptx::expect(barrier, bytes);
    if (bytes > 0) {
      ptx::load_bulk(to, static_cast<const Vector*>(data) + chunk.first, bytes, barrier);
    }
  }

  __device__ __forceinline__ void store(Vector* to, uint32_t vectors, uint32_t from) const {
    if (vectors > 0) ptx::store_bulk(to, from, vectors * kVectorBytes);
  }

  /// Sends by the threads of a role. `one(role, d, i, ready, asked)` sends chunk i of the message
  /// to peer d.
  template <typename One>
  __device__ __forceinline__ void send(const RoleThreads& role,
                                       const LaneChunks (&chunks)[kMaxCudaRanks], uint32_t n,
                                       One one) const {
    for (uint32_t i = 0; i < n; ++i) {
      const auto ready = [&] {
        return transport.await_peers(role, [&](int d) {
          return i >= transport.number_of(chunks[d]) || transport.has_room(0, d, i);
        });
      };
      bool asked = false;
#pragma unroll 1
      for (int d = 1; d < world; ++d) {
        if (!one(role, d, i, ready, asked)) return;
      }
      ptx::bar_sync(role.barrier, role.threads);
      if (role.thread == 0) transport.scattered(i + 1);
    }
  }

  /// Takes chunks out of a ring, by one thread. `place(d, i, f)` calls f(destination, vectors) for
  /// chunk i of peer d. `used(i)`: the first i have been read.
  template <typename Role, typename Place, typename MayStore, typename Used>
  __device__ __forceinline__ void take(const RoleThreads& role, Role which, int ring,
                                       const LaneChunks (&chunks)[kMaxCudaRanks], uint32_t n,
                                       Place place, MayStore may_store, Used used) const {
    if (role.thread != 0) return;
    const uint32_t each = world - 1;
    const Stages stages = transport.stages(which);
    stages.pump<false>(
        n * each,
        [&](uint32_t x) {
          const int d = static_cast<int>(1 + x % each);
          const uint32_t i = x / each;
          return i >= transport.number_of(chunks[d]) || transport.has_come(ring, d, i);
        },
        [&](uint32_t x, uint32_t to, ptx::TransactionBarrier* barrier) {
          const int d = static_cast<int>(1 + x % each);
          const uint32_t i = x / each;
          place(d, i, [&](Vector*, uint32_t vectors) {
            load(transport.own_slot(ring, d, i), {0, vectors}, to, barrier);
          });
        },
        [&](uint32_t x) {
          if ((x + 1) % each == 0) used((x + 1) / each);
        },
        [&](uint32_t x) { return may_store(x / each); },
        [&](uint32_t x, uint32_t from) {
          place(static_cast<int>(1 + x % each), x / each,
                [&](Vector* to, uint32_t vectors) { store(to, vectors, from); });
        },
        [](uint32_t) {});
  }

  /// Loads the inputs of a reduction: chunks from the first ring and from `own`. `part(i)`: the
  /// location of chunk i in `own`.
  template <typename PartOf>
  __device__ __forceinline__ void load_to_reduce(uint32_t n, PartOf part, const char* own) const {
    const Stages stages = transport.stages(Transport::kTake, true);
    const uint32_t each = stages.bytes / static_cast<uint32_t>(world);
    stages.load_all(
        n,
        [&](uint32_t i) {
          for (int d = 1; d < world; ++d) {
            if (!transport.has_come(0, d, i)) return false;
          }
          return true;
        },
        [&](uint32_t i, uint32_t to, ptx::TransactionBarrier* barrier) {
          const Chunk c = part(i);
          const uint32_t bytes = c.count * kVectorBytes;
          ptx::expect(barrier, bytes * static_cast<uint32_t>(world));
          if (bytes == 0) return;
          ptx::load_bulk(to, own + c.first * kVectorBytes, bytes, barrier);
          for (int d = 1; d < world; ++d) {
            ptx::load_bulk(to + d * each, transport.own_slot(0, d, i), bytes, barrier);
          }
        });
  }

  /// Adds up the chunks. Each thread of a role adds its vectors of each chunk and overwrites this
  /// rank's own values.
  template <typename Stage, int W, typename PartOf>
  __device__ __forceinline__ void reduce(const RoleThreads& role, uint32_t n, PartOf part) const {
    constexpr int kRanks = World<W>::kRanks, kAtOnce = kRanks > 2 ? 1 : 4;
    const Stages stages = transport.stages(Transport::kTake, true);
    const uint32_t each = stages.bytes / static_cast<uint32_t>(world);
    stages.add_all(n, [&](uint32_t stage, uint32_t i) {
      const uint32_t vectors = part(i).count;
      for (uint32_t k = role.thread; k < vectors; k += kAtOnce * role.threads) {
        Vector v[kAtOnce][kRanks];
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const uint32_t at = k + u * role.threads;
#pragma unroll
          for (int rank = 0; rank < kRanks; ++rank) {
            if (rank < world && at < vectors) {
              v[u][rank] =
                  ptx::ld_shared(stage + call.distance_to(rank, world) * each + at * kVectorBytes);
            }
          }
        }
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const uint32_t at = k + u * role.threads;
          if (at >= vectors) continue;
          ptx::st_shared(stage + at * kVectorBytes,
                         Stage::template reduced<false>(call, world, v[u]));
        }
      }
    });
  }

  /// Stores the sums: calls put(i, from) for the result of chunk i after may_put(i) has returned
  /// true.
  template <typename Put, typename MayPut>
  __device__ __forceinline__ void store_reduced(uint32_t n, Put put, MayPut may_put) const {
    const Stages stages = transport.stages(Transport::kTake, true);
    stages.store_all(
        n, [&](uint32_t i) { transport.taken(i + 1); }, may_put, put,
        [&](uint32_t i) { transport.reduced(i); });
  }
};

}  // namespace collx::cuda
