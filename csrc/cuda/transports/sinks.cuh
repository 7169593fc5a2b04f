// Sinks: the destinations of complete vectors. Each has
//
//   prepare(v)             converts v to the form that is stored. Called by whole warps
//   put(prepared)          stores the result. Called by the threads whose vectors have arrived
#pragma once

#include "session.cuh"
#include "wire.cuh"

namespace collx::cuda {

/// Stores wire(d) into this rank's slots at each peer, `offset` bytes after the first: see
/// slot_offset.
template <typename Wire, int Ranks, typename Get>
__device__ __forceinline__ void push_to_peers(const KernelCall& call, int world, uint32_t offset,
                                              Get wire) {
  for_peers<Ranks>(world, [&](int d) { Wire::push(call.outgoing[d] + offset, wire(d)); });
}

inline constexpr auto kToAll = [](int) { return true; };

/// Sends v[d] to each peer for which sends(d) is true. If `same`, it sends v[1] to all of them.
template <typename Wire, int Ranks, typename T, typename Sends>
__device__ __forceinline__ void send_to_peers(Session<T>& session, int world, uint32_t offset,
                                              Vector (&v)[Ranks], Sends sends, bool same = false) {
  for_peers<Ranks>(world, [&](int d) {
    if (!sends(d)) return;
    if (d == 1 || !same) v[d] = Wire::to_wire(v[d]);
    if (session.alive()) {
      Wire::push(session.call.outgoing[d] + offset, same ? v[1] : v[d]);
    }
  });
}

/// Sends load(d) to each of these peers. All loads are in flight together, and start before the
/// thread checks whether the communicator has failed.
template <typename Wire, int Ranks, typename T, typename Load, typename Sends = decltype(kToAll)>
__device__ __forceinline__ void load_and_send(Session<T>& session, int world, uint32_t offset,
                                              Load load, Sends sends = kToAll) {
  Vector v[Ranks];
  for_peers<Ranks>(world, [&](int d) {
    if (sends(d)) v[d] = load(d);
  });
  send_to_peers<Wire>(session, world, offset, v, sends);
}

/// Vector i of a tensor or message on this rank, if it has one. The additional loads of the tensor
/// start when the sink is constructed, before the thread waits for the vector.
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

/// This rank's slots at every peer. All peers get the same vector.
template <typename Wire, int Ranks>
struct PeerSlots {
  const KernelCall& call;
  int world;
  uint32_t offset;  // of the vector: see slot_offset

  __device__ __forceinline__ Vector prepare(Vector v) const { return Wire::to_wire(v); }
  __device__ __forceinline__ void put(Vector v) const {
    push_to_peers<Wire, Ranks>(call, world, offset, [&](int) { return v; });
  }
};

/// A slot at one rank.
template <typename Wire>
struct OneSlot {
  char* slot;

  __device__ __forceinline__ Vector prepare(Vector v) const { return Wire::to_wire(v); }
  __device__ __forceinline__ void put(Vector v) const { Wire::push(slot, v); }
};

/// A sink that passes the vector to a function.
template <typename Put>
struct SinkBy {
  const Put put;

  __device__ __forceinline__ Vector prepare(Vector v) const { return v; }
};
template <typename Put>
SinkBy(Put) -> SinkBy<Put>;

/// Stores to both sinks.
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
