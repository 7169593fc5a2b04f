// Sinks: where a vector goes when it is complete. All have
//
//   prepare(v)             what is stored of it, in the form that travels. By whole warps
//   put(prepared)          stores that, by threads to which all has come
#pragma once

#include "session.cuh"
#include "slots.cuh"

namespace collx::cuda {

/// Vector i of a tensor or of a message here, if it has one. What goes into it besides is asked for
/// when the sink is made, before the vector is awaited.
template <typename Tensor>
class TensorSink {
 public:
  __device__ __forceinline__ TensorSink(const Tensor& tensor, uint64_t i, bool has = true)
      : tensor_(tensor), i_(i), has_(has) {
    if (has) ahead_ = tensor.ahead(i);
  }

  __device__ __forceinline__ Vector prepare(Vector v) const { return v; }
  __device__ __forceinline__ void put(Vector v) const {
    if (has_) tensor_.store(i_, v, ahead_);
  }

 private:
  const Tensor& tensor_;
  const uint64_t i_;
  const bool has_;
  typename Tensor::Ahead ahead_;
};

/// This rank's slots at every peer: the same vector to all.
template <typename S, int Ranks>
struct PeerSlots {
  const KernelCall& call;
  int world;
  uint32_t offset;  // of the vector: see slot_offset

  __device__ __forceinline__ Vector prepare(Vector v) const { return S::sendable(v); }
  __device__ __forceinline__ void put(Vector wire) const {
#pragma unroll
    for (int d = 1; d < Ranks; ++d) {
      if (d < world) S::push(call.outgoing[d] + offset, wire);
    }
  }
};

/// A slot at one rank.
template <typename S>
struct OneSlot {
  char* slot;

  __device__ __forceinline__ Vector prepare(Vector v) const { return S::sendable(v); }
  __device__ __forceinline__ void put(Vector wire) const { S::push(slot, wire); }
};

/// A place in memory that peers read behind a barrier.
struct PlaceSink {
  Vector* place;

  __device__ __forceinline__ Vector prepare(Vector v) const { return v; }
  __device__ __forceinline__ void put(Vector v) const { *place = v; }
};

/// One sink, then the other.
template <typename A, typename B>
struct Both {
  A a;
  B b;

  struct Prepared {
    Vector a, b;
  };
  __device__ __forceinline__ Prepared prepare(Vector v) const {
    return {a.prepare(v), b.prepare(v)};
  }
  __device__ __forceinline__ void put(const Prepared& v) const {
    a.put(v.a);
    b.put(v.b);
  }
};
template <typename A, typename B>
Both(A, B) -> Both<A, B>;

}  // namespace collx::cuda
