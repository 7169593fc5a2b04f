// Bounded waits, and how a failure becomes known: to the host, and to the peers.
//
// MEMORY SEMANTICS  A report is written to every peer's inbox before that peer's poison word is
// set with release; whoever reads the word with acquire may read the record. The host's record is
// written before `ready` likewise.
// LIFETIME  A thread whose wait fails does not return: it skips all further waits and remote
// stores, and passes the remaining barriers of its block. No trap, no exit (design: the context
// must survive).
#pragma once

#include "../ptx/launch.cuh"
#include "../ptx/memory.cuh"
#include "kernel_call.cuh"

namespace collx::cuda {

/// What a failed wait waited for.
struct Blame {
  int peer;
  uint64_t expected;
  uint64_t seen;
};

/// What a block has to report when it ends. A call from within a polling loop would cost every
/// register of that loop, so threads leave a note and the end of the kernel reports it.
struct FailureNote {
  Failure failure;
  Phase phase;
  Blame blame;
  const CallDescriptor* other;
  uint64_t sends, expects;  // of `own` with that peer, where only the two of them know it
};

__device__ inline void publish(HostStatus* status, const StatusRecord& record) {
  status->record = record;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&status->ready) = 1;
}

/// Tells a failure here and to the peers. By the one thread of this rank that has claimed it.
__device__ __noinline__ inline void report(const KernelCall& call, const FailureNote& note) {
  StatusRecord record;
  record.failure = note.failure;
  record.phase = note.phase;
  record.rank = call.rank;
  record.peer = note.blame.peer;
  record.sequence = call.header()->sequence;
  record.expected = note.blame.expected;
  record.seen = note.blame.seen;
  record.own = call.descriptor;
  record.own.sends = note.sends;
  record.own.expects = note.expects;
  if (note.other != nullptr) record.other = *note.other;
  publish(call.status, record);
  for (int distance = 0; distance < call.world; ++distance) {
    RegionHeader* header = reinterpret_cast<RegionHeader*>(call.peer[distance]);
    header->inbox[call.rank] = record;
    ptx::st_release_sys(&header->poison, static_cast<uint32_t>(call.rank) + 1);
  }
}

/// Takes over what a peer has reported, if this rank knows of no failure yet.
__device__ __noinline__ inline void adopt(const KernelCall& call) {
  const uint32_t poison = ptx::ld_acquire_sys(&call.header()->poison);
  if (poison == 0 || atomicCAS(&call.header()->claimed, 0u, 1u) != 0) return;
  publish(call.status, call.header()->inbox[poison - 1]);
}

__device__ __forceinline__ FailureNote& block_note() {
  __shared__ FailureNote note;
  return note;
}

/// A thread's patience: once a wait has failed, later ones return at once.
class Patience {
 public:
  /// Asks for the poison word, but does not wait for the answer: see alive().
  __device__ explicit Patience(const KernelCall& call)
      : call_(call), poison_(ptx::ld_relaxed_sys(&call.header()->poison)) {}

  /// False when the communicator had failed before this call, or has since. To be asked before
  /// the first remote store, after this thread's first loads, so that all of them are in flight
  /// together.
  __device__ __forceinline__ bool alive() const { return poison_ == 0; }

  /// Gives up. The first thread of this rank to do so notes why, and is the one that reports it.
  __device__ __forceinline__ void fail(Failure failure, Phase phase, Blame blame,
                                       const CallDescriptor* other = nullptr, uint64_t sends = 0,
                                       uint64_t expects = 0) {
    poison_ = kFailed;
    if (atomicCAS(&call_.header()->claimed, 0u, 1u) != 0) return;
    poison_ = kReporter;
    block_note() = {failure, phase, blame, other, sends, expects};
  }

  /// Makes the block agree: false for all its threads when one of them has failed.
  __device__ bool agree() {
    if (__syncthreads_or(!alive()) != 0 && alive()) poison_ = kFailed;
    return alive();
  }

  /// Polls `ready()` until it is true, the time is up or the communicator is poisoned. `blame()`
  /// says what was missing. Lanes may leave at different times: no shuffle may follow without a
  /// __syncwarp (hazard 2).
  template <typename Ready, typename GetBlame>
  __device__ __forceinline__ bool wait(Phase phase, Ready ready, GetBlame blame) {
    if (!alive()) return false;
    uint64_t began = 0;
    for (uint32_t polls = 1; !ready(); ++polls) {
      if (polls % kPollsPerLook != 0) continue;
      poison_ = ptx::ld_relaxed_sys(&call_.header()->poison);
      if (!alive()) return false;
      const uint64_t now = ptx::globaltimer();
      if (began == 0) began = now;
      if (now - began < call_.timeout_ns) continue;
      fail(Failure::timeout, phase, blame());
      return false;
    }
    return true;
  }

  /// Last thing in a kernel, by all threads of a block of which one has failed.
  __device__ __forceinline__ void tell() const {
    if (poison_ == kReporter) {
      report(call_, block_note());
    } else if (threadIdx.x == 0) {
      adopt(call_);
    }
  }

 private:
  static constexpr uint32_t kPollsPerLook = 128;  // about 100 us of polling at the most
  // Values of poison_ that are no peer's: this thread has failed; it reports it, too.
  static constexpr uint32_t kFailed = ~0u;
  static constexpr uint32_t kReporter = ~1u;

  const KernelCall& call_;
  uint32_t poison_;
};

}  // namespace collx::cuda
