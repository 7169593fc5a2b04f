// One call on a communicator, as one block sees it: what every kernel does first and last.
//
// USAGE  First thing in a kernel, with the transport that the call goes through: tiles, pieces,
// channels, a barrier. Whatever the call opened is ended when the session goes out of scope, by all
// threads of the block, whether or not they have failed: no thread returns early.
#pragma once

#include "failure.cuh"

namespace collx::cuda {

/// Exchanges the calls' descriptors. Block 0 sends; every block waits before it touches a slot or
/// a tensor. The epoch is the header's own, the same for every op and algorithm; the last block to
/// have read it advances it.
/// `pairs`: what the call exchanges with each rank, where the two of them alone know it.
__device__ __forceinline__ void same_call(const KernelCall& call, Patience& patience,
                                          const Routes* pairs) {
  RegionHeader* own = call.header();
  const uint32_t epoch = *reinterpret_cast<volatile uint32_t*>(&own->check_epoch) + 1;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < call.world && peer != call.rank && patience.alive()) {
    uint64_t sends = 0, expects = 0;
    uint32_t mark = call.fingerprint;
    if (pairs != nullptr && call.descriptor.collective == Collective::alltoallv) {
      const int distance = call.distance_to(peer, call.world);
      sends = pairs->from[distance].bytes;
      expects = pairs->to[distance].bytes;
      mark = pair_fingerprint(mark, call.rank, peer, sends, expects);
    }
    const uint64_t value = static_cast<uint64_t>(epoch) << 32 | mark;
    if (blockIdx.x == 0) {
      CheckSlot& slot = call.header(peer)->check[epoch & 1][call.rank];
      slot.descriptor = call.descriptor;
      slot.descriptor.sends = sends;
      slot.descriptor.expects = expects;
      ptx::st_release_sys(&slot.flag, value);
    }
    CheckSlot& mail = own->check[epoch & 1][peer];
    uint64_t seen = 0;
    const bool arrived = patience.wait(
        Phase::check,
        [&] {
          seen = ptx::ld_acquire_sys(&mail.flag);
          return seen >> 32 == epoch;
        },
        [&] {
          return Blame{peer, epoch, seen >> 32};
        });
    if (arrived && seen != value) {
      patience.fail(Failure::mismatch, Phase::check, Blame{peer, value & ~0u, seen & ~0u},
                    &mail.descriptor, sends, expects);
    }
  }
  patience.agree();
  if (threadIdx.x == 0 && atomicAdd(&own->check_blocks, 1u) + 1 == gridDim.x) {
    own->check_blocks = 0;
    own->check_epoch = epoch;
  }
}

/// What most transports have nothing to say to.
struct Transport {
  static constexpr bool kSimple = false;
  static constexpr bool kCounts = true;  // a kernel is a call
  /// What the call exchanges with each rank, where no other rank knows it.
  template <typename... Given>
  static __device__ __forceinline__ const Routes* pairs(const Given&...) {
    return nullptr;
  }
  /// Whether another call uses the same memory at the same time.
  __device__ __forceinline__ bool overlaps() const { return false; }
};

/// `T`: made of the call, this thread's patience, and what else it is given; `end()` is called when
/// every thread of the block has come so far.
///
/// T::kSimple: the call that is worth straight code of its own. A sum of whole vectors, of equal
/// parts where there are parts, unchecked, in one use of the tiles, of at most one vector a thread.
template <typename T>
class Session {
 public:
  static constexpr bool kSimple = T::kSimple;

  /// Waits for upstream work, then looks whether the communicator still works, and in checked
  /// mode whether all ranks make the same call.
  template <typename... Given>
  __device__ __forceinline__ explicit Session(const KernelCall& call, Given&... given)
      : call(call),
        patience((ptx::griddepcontrol_wait(), call)),
        transport((begin(T::pairs(given...)), call), patience, given...) {}

  __device__ __forceinline__ ~Session() {
    if (transport.overlaps() && alive()) {
      patience.fail(Failure::overlap, Phase::none, Blame{call.rank, 0, 1});
    }
    const bool failed = __syncthreads_or(!alive());
    transport.end();
    if (T::kCounts && blockIdx.x == 0 && threadIdx.x == 0 && !failed) {
      ptx::red_add(&call.header()->sequence, 1);
    }
    if (call.pdl == PdlLevel::end) ptx::griddepcontrol_launch_dependents();
    // At the very end, where a call costs no registers.
    if (__builtin_expect(failed, 0)) patience.tell();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Whether this thread may still wait and store to peers: see Patience::alive.
  __device__ __forceinline__ bool alive() const { return patience.alive(); }

  const KernelCall& call;
  Patience patience;
  T transport;

 private:
  __device__ __forceinline__ void begin(const Routes* pairs) {
    if (call.pdl == PdlLevel::early) ptx::griddepcontrol_launch_dependents();
    if (!kSimple && call.check) same_call(call, patience, pairs);
  }
};

}  // namespace collx::cuda
