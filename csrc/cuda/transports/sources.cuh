// Sources: where a thread gets one vector from each rank, in rank order. Each has
//
//   kRanks                 the number of vectors; one if the source returns them reduced
//   take(v)                waits until all have arrived; returns false if one never arrives.
//                          Called by whole warps, since vectors may have to be unmasked together
//   rearm()                called after all of them have been read: their memory may be reused
#pragma once

#include "session.cuh"
#include "wire.cuh"

namespace collx::cuda {

/// Offset of vector i of a use from the slots of stage 0 and parity 0 of the same sender.
__device__ __forceinline__ uint32_t slot_offset(const KernelCall& call, int stage, uint32_t epoch,
                                                uint32_t i) {
  return (2 * stage + (epoch & 1)) * call.parity_bytes + i * kVectorBytes;
}

/// The slots where one vector arrives from each rank. No other rank writes this rank's own slot.
/// `Alike`: the offset from the slots of each sender is the same.
///
/// For few ranks the addresses are kept, so that a polling loop does not compute them. For many
/// ranks they would take registers that the vectors need.
template <int Ranks, bool Alike = true>
class Arrivals {
  static constexpr bool kKept = Ranks <= 4;

 public:
  /// `offset`: the vector's slot_offset.
  __device__ __forceinline__ Arrivals(const KernelCall& call, uint32_t offset)
      : Arrivals(call, [=](int) { return offset; }) {}

  /// `offset_of(source)`: the slot_offset for each source, if they differ.
  template <typename OffsetOf>
  __device__ __forceinline__ Arrivals(const KernelCall& call, OffsetOf offset_of) : call_(call) {
#pragma unroll
    for (int source = 0; source < Ranks; ++source) {
      if constexpr (kKept) {
        slot_[source] = ptx::keep(call.arriving + offset_of(source) + source * call.source_bytes);
      } else if (!Alike || source == 0) {
        offset_[source] = offset_of(source);
      }
    }
  }

  __device__ __forceinline__ char* slot(int source) const {
    if constexpr (kKept) {
      return slot_[source];
    } else {
      return call_.arriving +
             (ptx::keep(offset_[Alike ? 0 : source]) + source * call_.source_bytes);
    }
  }

 private:
  const KernelCall& call_;
  char* slot_[kKept ? Ranks : 1];
  uint32_t offset_[kKept || Alike ? 1 : Ranks];
};

/// Waits for the vectors of all peers.
struct FromPeers {
  int world, rank;
  __device__ __forceinline__ bool operator()(int source) const {
    return source < world && source != rank;
  }
};
/// Waits for the vectors of some ranks, which are given as bits.
struct FromSome {
  uint32_t ranks;
  __device__ __forceinline__ bool operator()(int source) const {
    return (ranks >> source & 1) != 0;
  }
};

/// Slots in a wire format. `own` replaces the vectors of ranks that send nothing. It is a vector as
/// it is read from a slot.
template <typename Wire, int Ranks, typename SessionOf, typename From, bool Alike = true>
class SlotSource {
 public:
  static constexpr int kRanks = Ranks;

  /// `epoch`: for the failure report.
  __device__ __forceinline__ SlotSource(SessionOf& session, Phase phase, uint32_t epoch,
                                        const Vector& own, const Arrivals<Ranks, Alike>& arrivals,
                                        From from)
      : session_(session),
        phase_(phase),
        epoch_(epoch),
        own_(own),
        arrivals_(arrivals),
        from_(from) {}

  __device__ __forceinline__ bool take(Vector (&v)[Ranks]) const {
    const bool arrived = session_.patience.wait(
        phase_,
        [&] {
          uint32_t worst = 0;
#pragma unroll
          for (int source = 0; source < Ranks; ++source) {
            Vector seen = own_;
            if (from_(source)) worst = max(worst, Wire::poll(arrivals_.slot(source), seen));
            v[source] = seen;
          }
          return worst != ~0u;
        },
        [&] {
          int missing = session_.call.rank;  // no rank: all have arrived since
          Vector seen;
#pragma unroll
          for (int source = Ranks - 1; source >= 0; --source) {
            if (from_(source) && Wire::poll(arrivals_.slot(source), seen) == ~0u) missing = source;
          }
          return Blame{missing, epoch_, 0};
        });
    if constexpr (Wire::kMasked) {
#pragma unroll
      for (int source = 0; source < Ranks; ++source) {
        if (from_(source)) v[source] = Wire::from_wire(v[source]);
      }
    }
    return arrived;
  }

  __device__ __forceinline__ void rearm() const {
#pragma unroll
    for (int source = 0; source < Ranks; ++source) {
      if (from_(source)) Wire::rearm(arrivals_.slot(source));
    }
  }

  /// Passes the vectors that have arrived to f(vectors), and then re-arms the slots.
  template <typename F>
  __device__ __forceinline__ void drain(F f) const {
    Vector v[Ranks];
    if (!take(v)) return;
    f(v);
    rearm();
  }

 private:
  SessionOf& session_;
  const Phase phase_;
  const uint32_t epoch_;
  const Vector own_;
  const Arrivals<Ranks, Alike> arrivals_;
  const From from_;
};

/// The slots of every peer, at the same offset.
template <typename Wire, int Ranks, typename T>
__device__ __forceinline__ auto from_slots(Session<T>& session, Phase phase, uint32_t epoch,
                                           uint32_t offset, int world, const Vector& own) {
  return SlotSource<Wire, Ranks, Session<T>, FromPeers>(session, phase, epoch, own,
                                                        Arrivals<Ranks>(session.call, offset),
                                                        FromPeers{world, session.call.rank});
}
/// The slots of some ranks, at an offset for each rank.
template <typename Wire, int Ranks, bool Alike, typename T>
__device__ __forceinline__ auto from_slots_of(Session<T>& session, Phase phase, uint32_t epoch,
                                              const Arrivals<Ranks, Alike>& arrivals,
                                              uint32_t ranks, const Vector& own) {
  return SlotSource<Wire, Ranks, Session<T>, FromSome, Alike>(session, phase, epoch, own, arrivals,
                                                              FromSome{ranks});
}

/// Takes one rank's vector in its wire format. Returns false if it does not arrive.
template <typename Wire, typename T>
__device__ __forceinline__ bool take_one(Session<T>& session, Phase phase, int source,
                                         uint32_t epoch, const char* slot, Vector& v) {
  return session.patience.wait(
      phase, [&] { return Wire::poll(slot, v) != ~0u; },
      [&] {
        return Blame{source, epoch, 0};
      });
}

/// Memory of this rank, or memory that a barrier has made visible. `get(rank)` loads the vector of
/// one of the first `world` ranks.
template <int Ranks, typename Get>
class MemorySource {
 public:
  static constexpr int kRanks = Ranks;

  __device__ __forceinline__ MemorySource(int world, Get get) : world_(world), get_(get) {}

  __device__ __forceinline__ bool take(Vector (&v)[Ranks]) const {
#pragma unroll
    for (int rank = 0; rank < Ranks; ++rank) {
      if (rank < world_) v[rank] = get_(rank);
    }
    return true;
  }
  __device__ __forceinline__ void rearm() const {}

 private:
  const int world_;
  const Get get_;
};
template <int Ranks, typename Get>
__device__ __forceinline__ auto from_memory(int world, Get get) {
  return MemorySource<Ranks, Get>(world, get);
}

}  // namespace collx::cuda
