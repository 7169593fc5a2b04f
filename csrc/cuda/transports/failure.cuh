// Bounded waits, and how a failure becomes known: to the host, and to the peers.
//
// NOTES  A rank of which a thread waits in vain, until its time is up or after it has seen the
// poison word, leaves a note with every rank. The first such rank sets the poison words, too. The
// host follows the notes to the rank that is missing (protocol/blame.h).
// MEMORY SEMANTICS  A note is written before its `left` is set with release, and that before the
// poison words: whoever reads either with acquire may read the note. The host's record is written
// before `ready` likewise, and behind the notes.
// LIFETIME  A thread whose wait fails does not return: it skips all further waits and remote
// stores, and passes the remaining barriers of its block. No trap, no exit (design: the context
// must survive).
#pragma once

#include "../arguments/kernel_call.cuh"
#include "../ptx/launch.cuh"
#include "../ptx/memory.cuh"

namespace collx::cuda {

/// What a failed wait waited for.
struct Blame {
  int peer;
  uint64_t expected;
  uint64_t seen;
  int lane = -1;
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

__device__ inline void publish(Recorded& place, const StatusRecord& record) {
  place.record = record;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&place.ready) = 1;
}

/// To the host, by the first of this rank's threads that has something to say.
__device__ inline void publish_first(const KernelCall& call, const StatusRecord& record) {
  if (atomicCAS(&call.header()->claimed, 0u, 1u) == 0) publish(call.status->by_kernel, record);
}

/// Copies a record by loads of which many are under way at once. It is here that every kernel gets
/// its 57 registers: with fewer, a multiprocessor would take more than 1024 threads. Of the grid
/// that is launched next some blocks would come early then, and the others to where there is room:
/// three of 512 threads on some multiprocessors, one on others (measured, with early dependent
/// launch: 4 % of an all-reduce of 4 MiB, 5 % of a gather of 1 MiB).
__device__ __forceinline__ void copy_record(StatusRecord& to, const StatusRecord& from) {
  constexpr int kWords = sizeof(StatusRecord) / sizeof(uint64_t), kAtOnce = 16;
  static_assert(kWords * sizeof(uint64_t) == sizeof(StatusRecord));
  const auto* source = reinterpret_cast<const volatile uint64_t*>(&from);
  auto* target = reinterpret_cast<volatile uint64_t*>(&to);
#pragma unroll 1
  for (int first = 0; first < kWords; first += kAtOnce) {
    uint64_t word[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) word[i] = first + i < kWords ? source[first + i] : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < kWords) target[first + i] = word[i];
    }
  }
}

/// Leaves this rank's note with every rank, and tells the host. By the one thread that wrote it.
/// The note is composed where it stays here: a copy of it on the stack would be every kernel's
/// stack.
__device__ __noinline__ inline void report(const KernelCall& call, const FailureNote& note) {
  const auto header = [&](int distance) {
    return reinterpret_cast<RegionHeader*>(call.peer[distance]);
  };
  StatusRecord& record = header(0)->inbox[call.rank].record;
  record.failure = note.failure;
  record.phase = note.phase;
  record.rank = call.rank;
  record.peer = note.blame.peer;
  record.lane = note.blame.lane;
  record.sequence = call.header()->sequence;
  record.expected = note.blame.expected;
  record.seen = note.blame.seen;
  record.own = call.descriptor;
  record.own.sends = note.sends;
  record.own.expects = note.expects;
  if (note.other != nullptr) record.other = *note.other;
  const bool first = ptx::ld_acquire_sys(&call.header()->poison) == 0;
  for (int distance = 0; distance < call.world; ++distance) {
    Note& left = header(distance)->inbox[call.rank];
    if (distance > 0) copy_record(left.record, record);
    ptx::st_release_sys(&left.left, 1u);
  }
  for (int distance = 0; first && distance < call.world; ++distance) {
    ptx::st_release_sys(&header(distance)->poison, static_cast<uint32_t>(call.rank) + 1);
  }
  publish_first(call, record);
}

/// Adds to this rank's note that a thread waited for `peer` in vain.
__device__ __noinline__ inline void note_missed(const KernelCall& call, int peer) {
  if (atomicExch(&call.header()->inbox[call.rank].missed[peer], 1u) != 0) return;
  for (int distance = 1; distance < call.world; ++distance) {
    auto* header = reinterpret_cast<RegionHeader*>(call.peer[distance]);
    ptx::st_release_sys(&header->inbox[call.rank].missed[peer], 1u);
  }
}

/// Takes over what a peer has reported, for a call that began when that had failed.
__device__ __noinline__ inline void adopt(const KernelCall& call) {
  const uint32_t poison = ptx::ld_acquire_sys(&call.header()->poison);
  if (poison != 0) publish_first(call, call.header()->inbox[poison - 1].record);
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

  /// Gives up. The first thread of this rank to do so writes the note, and is the one to leave it.
  __device__ __forceinline__ void fail(Failure failure, Phase phase, Blame blame,
                                       const CallDescriptor* other = nullptr, uint64_t sends = 0,
                                       uint64_t expects = 0) {
    poison_ =
        failure == Failure::timeout ? kFailed + 1 + static_cast<uint32_t>(blame.peer) : kFailed;
    if (atomicCAS(&call_.header()->noted, 0u, 1u) != 0) return;
    poison_ |= kReporter;
    block_note() = {failure, phase, blame, other, sends, expects};
  }

  /// Makes the block agree: false for all its threads when one of them has failed.
  __device__ bool agree() {
    if (__syncthreads_or(!alive()) != 0 && alive()) poison_ = kFailed;
    return alive();
  }

  /// Polls `ready()` until it is true, the time is up or the communicator is poisoned. `blame()`
  /// says who was missing. Lanes may leave at different times: no shuffle may follow without a
  /// __syncwarp (hazard 2).
  template <typename Ready, typename GetBlame>
  __device__ __forceinline__ bool wait(Phase phase, Ready ready, GetBlame blame) {
    if (!alive()) return false;
    uint64_t began = 0;
    for (uint32_t polls = 1; !ready(); ++polls) {
      if (polls % kPollsPerLook != 0) continue;
      if (alive()) {
        poison_ = ptx::ld_relaxed_sys(&call_.header()->poison);
        const uint64_t now = ptx::globaltimer();
        if (began == 0) began = now;
        // Poisoned: what does not come within some polls more has not been sent.
        if (!alive() || now - began < call_.timeout_ns) continue;
      }
      fail(Failure::timeout, phase, blame());
      return false;
    }
    return true;
  }

  /// Last thing in a kernel, by all threads of a block of which one has failed.
  __device__ __forceinline__ void tell() const {
    const uint32_t missed = poison_ >= kFailed ? poison_ % kFailed : 0;
    if (missed != 0) note_missed(call_, static_cast<int>(missed) - 1);
    if ((poison_ & kReporter) != 0) {
      report(call_, block_note());
    } else if (threadIdx.x == 0) {
      adopt(call_);
    }
  }

 private:
  static constexpr uint32_t kPollsPerLook = 128;  // about 100 us of polling at the most
  // Values of poison_ that are no peer's: this thread has failed, plus 1 + the rank that it waited
  // for; it leaves the note, too.
  static constexpr uint32_t kFailed = 0x100;
  static constexpr uint32_t kReporter = 0x200;

  const KernelCall& call_;
  uint32_t poison_;
};

}  // namespace collx::cuda
