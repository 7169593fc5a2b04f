// The first and last steps of every kernel: the session of one block in a call on a communicator.
//
// USAGE  A kernel begins with a session for its transport: tiles, pieces, channels or a barrier.
// The destructor ends what the call has opened. All threads of the block reach it, even after a
// failure: no thread returns early.
#pragma once

#include "failure.cuh"

namespace collx::cuda {

/// Advances an epoch of the header, in the last block that has read it. Called by one thread of
/// each block. `blocks`: the blocks of this call that have read it.
__device__ __forceinline__ void advance(uint32_t& epoch, uint32_t& blocks, uint32_t next) {
  if (atomicAdd(&blocks, 1u) + 1 != gridDim.x) return;
  blocks = 0;
  epoch = next;
}

/// Exchanges the descriptors of the calls. Block 0 sends. Every block waits before it accesses a
/// slot or a tensor. The epoch is in the header and is the same for every op and algorithm.
/// `pairs`: the messages to and from each rank, if only the two ranks know them.
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
  if (threadIdx.x == 0) advance(own->check_epoch, own->check_blocks, epoch);
}

/// Defaults of the transports.
struct Transport {
  static constexpr bool kSimple = false;
  static constexpr bool kCounts = true;  // each kernel counts as one call
  /// The messages to and from each rank, if no other rank knows them.
  template <typename... Given>
  static __device__ __forceinline__ const Routes* pairs(const Given&...) {
    return nullptr;
  }
  /// Whether another call uses the same memory at the same time.
  __device__ __forceinline__ bool overlaps() const { return false; }
};

/// `T` is constructed from the call, this thread's patience, and the other arguments. `end()` is
/// called after every thread of the block has reached the end.
///
/// T::kSimple: the call has specialized straight-line code. Such a call is a sum of whole vectors,
/// with equal parts if there are parts, unchecked, in one use of the tiles, with at most one vector
/// for each thread. (With splits in device memory, the vectors and parts may be any.)
template <typename T>
class Session {
 public:
  static constexpr bool kSimple = T::kSimple;

  /// Waits for upstream work. Then it loads the poison word and, in checked mode, checks that all
  /// ranks make the same call.
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
    // At the end of the kernel, where a function call costs no registers.
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
