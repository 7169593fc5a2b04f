// Wire formats: how a vector travels through slots. Each word carries its own arrival flag, so that
// no barrier is needed. A slot is armed with words of all ones, which no sender sends. The planes
// of the fused norms, each in its own format, are in row_wire.cuh.
//
// MEMORY LAYOUT  protocol/cuda_layout.h: SlotArea. Vector i of a use is 16 i bytes after
// slot(stage, parity of the epoch, sender).
// MEMORY SEMANTICS  Words are stored and polled with relaxed order: each word is checked on its
// own, and nothing else is inferred from it. The reader re-arms the words that it has read. Between
// calls, the kernel boundary orders this before the rank's next pushes. Within a kernel, a fence
// must order it (see docs/internals/protocol.md).
#pragma once

#include "../../protocol/cuda_layout.h"
#include "../../protocol/norm.h"
#include "../ptx/memory.cuh"

namespace collx::cuda {

/// A slot: the first `Words` words of a vector. `Wide`: every two of them form one 64-bit word.
template <int Words, bool Wide = false>
struct Slot {
  static_assert(Words == 1 || Words == 2 || Words == 4);

  static __device__ __forceinline__ void push(char* slot, Vector v) {
    if constexpr (Wide) {
      ptx::st_relaxed_sys_b64(reinterpret_cast<Vector*>(slot), v);
    } else if constexpr (Words == 4) {
      ptx::st_relaxed_sys(reinterpret_cast<Vector*>(slot), v);
    } else if constexpr (Words == 2) {
      ptx::st_relaxed_sys(reinterpret_cast<uint2*>(slot), make_uint2(v.word[0], v.word[1]));
    } else {
      ptx::st_relaxed_sys(reinterpret_cast<uint32_t*>(slot), v.word[0]);
    }
  }

  /// Returns all ones while a word of the slot has not arrived, and a smaller value when all have
  /// arrived. Thus the maximum over several slots shows whether all of them have arrived.
  static __device__ __forceinline__ uint32_t poll(const char* slot, Vector& v) {
    if constexpr (Wide) {
      v = ptx::ld_relaxed_sys_b64(reinterpret_cast<const Vector*>(slot));
      return max(v.word[0] & v.word[1], v.word[2] & v.word[3]);
    } else if constexpr (Words == 4) {
      v = ptx::ld_relaxed_sys(reinterpret_cast<const Vector*>(slot));
      return max(max(v.word[0], v.word[1]), max(v.word[2], v.word[3]));
    } else if constexpr (Words == 2) {
      const uint2 seen = ptx::ld_relaxed_sys(reinterpret_cast<const uint2*>(slot));
      v.word[0] = seen.x;
      v.word[1] = seen.y;
      return max(seen.x, seen.y);
    } else {
      return v.word[0] = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>(slot));
    }
  }

  static __device__ __forceinline__ void rearm(char* slot) {
    push(slot, Vector{{~0u, ~0u, ~0u, ~0u}});
  }
};

/// Floats are sent unchanged, except that a word of all ones, which is a NaN in every float type,
/// becomes another NaN. float64 is checked by 64-bit words.
template <DType D>
struct SentinelWire : Slot<4, dtype_size(D) == 8> {
  static constexpr bool kMasked = false;

  static __device__ __forceinline__ Vector to_wire(Vector v) {
    if constexpr (dtype_size(D) == 8) {
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
  static __device__ __forceinline__ Vector from_wire(Vector v) { return v; }
  /// A vector of this rank, as the peers receive it.
  static __device__ __forceinline__ Vector own(Vector v) { return to_wire(v); }
  /// The data vector that wire vector i of a message carries.
  static __device__ __forceinline__ uint64_t data_index(uint64_t i) { return i; }
};

/// Arbitrary bits: integers and copies. Of the 32 vectors of a warp, 31 carry data. Words of all
/// ones are sent as zeros, and the last lane's vector marks them: bit l of its word w stands for
/// word w of lane l. None of its words can be all ones, since it has no bit for itself.
///
/// Every lane of a warp calls to_wire() and from_wire() together.
struct MaskedWire : Slot<4> {
  static constexpr bool kMasked = true;
  static constexpr uint32_t kMaskLane = kWarpLanes - 1;

  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kWarpLanes; }

  static __device__ __forceinline__ Vector to_wire(Vector v) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const bool ones = v.word[w] == ~0u && lane() != kMaskLane;
      const uint32_t mask = __ballot_sync(~0u, ones);
      v.word[w] = lane() == kMaskLane ? mask : ones ? 0 : v.word[w];
    }
    return v;
  }
  static __device__ __forceinline__ Vector from_wire(Vector v) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t mask = __shfl_sync(~0u, v.word[w], kMaskLane);
      if (mask >> lane() & 1) v.word[w] = ~0u;
    }
    return v;
  }
  static __device__ __forceinline__ Vector own(Vector v) { return v; }
  /// A mask vector has no data vector.
  static __device__ __forceinline__ uint64_t data_index(uint64_t i) {
    constexpr uint64_t kNoVector = ~0ull >> 8;
    const uint64_t lane = i % kWarpLanes;
    return lane == kMaskLane ? kNoVector : i / kWarpLanes * kMaskLane + lane;
  }
};

/// One byte for each of `Count` elements. No word is all ones: fp8 results never contain 0xFF (see
/// stages/quantize.cuh). int8 results never contain -128, and travel with their lower seven bits
/// inverted.
template <int Count>
struct ByteWire : Slot<Count / 4> {
  const Quantization quantization;

  __device__ __forceinline__ explicit ByteWire(Quantization q) : quantization(q) {}
  __device__ __forceinline__ Vector to_wire(Vector v) const {
    const uint32_t turned = quantization == Quantization::int8 ? 0x7F7F7F7Fu : 0;
    return {{v.word[0] ^ turned, v.word[1] ^ turned}};
  }
  __device__ __forceinline__ Vector from_wire(Vector v) const { return to_wire(v); }
};

/// One float32, which is not a NaN other than the canonical one.
struct FloatWire : Slot<1> {
  static __device__ __forceinline__ Vector to_wire(Vector v) { return v; }
  static __device__ __forceinline__ Vector from_wire(Vector v) { return v; }
};

/// For reductions: floats reserve a bit pattern, integers are masked.
template <DType D>
struct WireOf : MaskedWire {};
template <DType D>
requires(has_sentinel(D)) struct WireOf<D> : SentinelWire<D> {
};

namespace detail {

template <typename Stage>
struct WireOfStage {
  using Wire = MaskedWire;
};
template <typename Stage>
requires(Stage::kReduces) struct WireOfStage<Stage> {
  using Wire = WireOf<Stage::kDType>;
};

}  // namespace detail

/// The wire format for the vectors of a stage.
template <typename Stage>
using WireFor = typename detail::WireOfStage<Stage>::Wire;

}  // namespace collx::cuda
