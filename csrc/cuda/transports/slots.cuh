// Slots: pushed data that carries its own arrival flag, so that no barrier is needed.
//
// MEMORY LAYOUT  protocol/cuda_layout.h: SlotArea. Vector i of a use stands at 16 i bytes
// behind slot(stage, parity of the epoch, sender). MEMORY SEMANTICS  Words are stored and
// polled relaxed: each is checked on its own, and nothing else is inferred from it. The reader
// re-arms what it read. Between calls the kernel boundary orders that before the rank's next
// pushes; inside a kernel a fence must (see docs/protocol.md).
#pragma once

#include "../../protocol/cuda_layout.h"
#include "../ptx/memory.cuh"

namespace collx::cuda {

/// Floats: a slot is armed with words of all ones. Senders turn that word, a NaN, into another NaN.
template <DType D>
struct SentinelSlots {
  static constexpr bool kMasked = false;
  static constexpr bool kWide = dtype_size(D) == 8;  // float64 is checked by whole words

  /// Never a word of all ones; NaNs stay NaNs, in every float type.
  static __device__ __forceinline__ Vector sendable(Vector v) {
    if constexpr (kWide) {
      if ((v.word[0] & v.word[1]) == ~0u) v.word[1] = 0x7FFFFFFFu;
      if ((v.word[2] & v.word[3]) == ~0u) v.word[3] = 0x7FFFFFFFu;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (v.word[i] == ~0u) v.word[i] = 0x7FFF7FFFu;
      }
    }
    return v;
  }
  /// A vector of this rank's, as the peers will have it.
  static __device__ __forceinline__ Vector own(Vector v) { return sendable(v); }

  static __device__ __forceinline__ void push(char* slot, Vector v) {
    if constexpr (kWide) {
      ptx::st_relaxed_sys_b64(reinterpret_cast<Vector*>(slot), v);
    } else {
      ptx::st_relaxed_sys(reinterpret_cast<Vector*>(slot), v);
    }
  }

  /// All ones while a word of the vector is still to come, something less once all are there:
  /// the largest of several answers says whether all of them have arrived.
  static __device__ __forceinline__ uint32_t poll(const char* slot, Vector& v) {
    if constexpr (kWide) {
      v = ptx::ld_relaxed_sys_b64(reinterpret_cast<const Vector*>(slot));
      return max(v.word[0] & v.word[1], v.word[2] & v.word[3]);
    } else {
      v = ptx::ld_relaxed_sys(reinterpret_cast<const Vector*>(slot));
      return max(max(v.word[0], v.word[1]), max(v.word[2], v.word[3]));
    }
  }

  static __device__ __forceinline__ Vector received(Vector v) { return v; }

  static __device__ __forceinline__ void rearm(char* slot) {
    push(slot, Vector{{~0u, ~0u, ~0u, ~0u}});
  }
};

/// Fewer words of the same kind, for results of a byte an element and for single ones: the first
/// `Words` of a vector. Never all ones: see the quantization of stages/norm.cuh.
template <int Words>
struct NarrowSlots {
  static_assert(Words == 1 || Words == 2);
  static __device__ __forceinline__ void push(char* slot, Vector v) {
    if constexpr (Words == 2) {
      ptx::st_relaxed_sys(reinterpret_cast<uint2*>(slot), make_uint2(v.word[0], v.word[1]));
    } else {
      ptx::st_relaxed_sys(reinterpret_cast<uint32_t*>(slot), v.word[0]);
    }
  }
  static __device__ __forceinline__ uint32_t poll(const char* slot, Vector& v) {
    if constexpr (Words == 2) {
      const uint2 seen = ptx::ld_relaxed_sys(reinterpret_cast<const uint2*>(slot));
      v.word[0] = seen.x;
      v.word[1] = seen.y;
      return max(seen.x, seen.y);
    } else {
      return v.word[0] = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>(slot));
    }
  }
  static __device__ __forceinline__ void rearm(char* slot) { push(slot, Vector{{~0u, ~0u}}); }
};

/// Bits of any kind: integers and copies. Of a warp's 32 vectors 31 carry data; words of all ones
/// are sent as zeros, and the last lane's vector says which they were: bit l of its word w stands
/// for word w of lane l. No word of it can be all ones, since it has no bit for itself.
///
/// Every lane of a warp calls sendable() and received() together.
struct MaskedSlots : SentinelSlots<DType::int32> {
  static constexpr bool kMasked = true;
  static constexpr uint32_t kWarp = 32;
  static constexpr uint32_t kMaskLane = kWarp - 1;

  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kWarp; }

  static __device__ __forceinline__ Vector sendable(Vector v) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const bool ones = v.word[w] == ~0u && lane() != kMaskLane;
      const uint32_t mask = __ballot_sync(~0u, ones);
      v.word[w] = lane() == kMaskLane ? mask : ones ? 0 : v.word[w];
    }
    return v;
  }

  static __device__ __forceinline__ Vector own(Vector v) { return v; }

  static __device__ __forceinline__ Vector received(Vector v) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t mask = __shfl_sync(~0u, v.word[w], kMaskLane);
      if (mask >> lane() & 1) v.word[w] = ~0u;
    }
    return v;
  }
};

/// The data vector that wire vector i of a message carries; none for a mask.
inline constexpr uint64_t kNoVector = ~0ull >> 8;
template <typename S>
__device__ __forceinline__ uint64_t data_index(uint64_t wire) {
  if constexpr (!S::kMasked) return wire;
  const uint64_t lane = wire % MaskedSlots::kWarp;
  return lane == MaskedSlots::kMaskLane ? kNoVector
                                        : wire / MaskedSlots::kWarp * MaskedSlots::kMaskLane + lane;
}

namespace detail {
template <DType D, bool sentinel>
struct SlotsOf {
  using type = SentinelSlots<D>;
};
template <DType D>
struct SlotsOf<D, false> {
  using type = MaskedSlots;
};
}  // namespace detail

/// Of reductions: floats give up a pattern, integers are masked.
template <DType D>
using Slots = typename detail::SlotsOf<D, has_sentinel(D)>::type;

}  // namespace collx::cuda
