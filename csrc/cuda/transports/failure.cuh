// Bounded waits, and how a rank reports a failure to the host and to its peers.
//
// NOTES  If a thread's wait times out, or is still unfinished after the thread has seen the poison
// word, its rank leaves a note at every rank. The first such rank also sets the poison words. The
// host follows the notes to the missing rank (protocol/blame.h).
// MEMORY SEMANTICS  A rank writes a note, then sets its `left` with release, then sets the poison
// words. A thread that reads `left` or the poison word with acquire may read the note. In the same
// way, the host's record is written before `ready`, and after the notes.
// LIFETIME  A thread whose wait fails does not return. It skips all further waits and remote
// stores, and passes the remaining barriers of its block. No trap and no exit: the context must
// survive.
#pragma once

#include "../arguments/kernel_call.cuh"
#include "../ptx/launch.cuh"
#include "../ptx/memory.cuh"

namespace collx::cuda {

/// The peer and the word that a failed wait was for.
struct Blame {
  int peer;
  uint64_t expected;
  uint64_t seen;
  int lane = -1;
};

/// The failure that a block reports when it ends. A function call in a polling loop would cost all
/// registers of the loop. Therefore a thread only leaves a note, and the end of the kernel reports
/// it.
struct FailureNote {
  Failure failure;
  Phase phase;
  Blame blame;
  const CallDescriptor* other;
  uint64_t sends, expects;  // of `own` with that peer, if only these two ranks know it
};

__device__ inline void publish(Recorded& place, const StatusRecord& record) {
  place.record = record;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&place.ready) = 1;
}

/// Reports to the host. Only the first call of this rank's threads has an effect.
__device__ inline void publish_first(const KernelCall& call, const StatusRecord& record) {
  if (atomicCAS(&call.header()->claimed, 0u, 1u) == 0) publish(call.status->by_kernel, record);
}

/// Copies a record, with many loads in flight at once. This function sets the number of registers
/// of every kernel to 57. With fewer registers, a multiprocessor would hold more than 1024 threads.
/// Some blocks of the next grid would then start early, and the others would start where there is
/// room: three blocks of 512 threads on some multiprocessors, one on others. (Measured cost with
/// early dependent launch: 4 % of an all-reduce of 4 MiB, 5 % of a gather of 1 MiB.)
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

/// Leaves this rank's note at every rank and reports it to the host. The thread that wrote the note
/// calls this. The note is composed in its final place on this rank: a copy on the stack would give
/// every kernel a stack frame.
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

/// Records in this rank's note that a wait for `peer` has failed.
__device__ __noinline__ inline void note_missed(const KernelCall& call, int peer) {
  if (atomicExch(&call.header()->inbox[call.rank].missed[peer], 1u) != 0) return;
  for (int distance = 1; distance < call.world; ++distance) {
    auto* header = reinterpret_cast<RegionHeader*>(call.peer[distance]);
    ptx::st_release_sys(&header->inbox[call.rank].missed[peer], 1u);
  }
}

/// Reports the note of a peer, for a call that began after the failure.
__device__ __noinline__ inline void adopt(const KernelCall& call) {
  const uint32_t poison = ptx::ld_acquire_sys(&call.header()->poison);
  if (poison != 0) publish_first(call, call.header()->inbox[poison - 1].record);
}

__device__ __forceinline__ FailureNote& block_note() {
  __shared__ FailureNote note;
  return note;
}

/// The bounded waits of a thread. After one wait has failed, later ones return at once.
class Patience {
 public:
  /// Starts the load of the poison word, and does not wait for it: see alive().
  __device__ explicit Patience(const KernelCall& call)
      : call_(call), poison_(ptx::ld_relaxed_sys(&call.header()->poison)) {}

  /// False if the communicator failed before this call, or has failed since. Call it before the
  /// first remote store and after this thread's first loads, so that all loads are in flight
  /// together.
  __device__ __forceinline__ bool alive() const { return poison_ == 0; }

  /// Marks this thread as failed. The first thread of this rank to do so writes the note, and later
  /// reports it.
  __device__ __forceinline__ void fail(Failure failure, Phase phase, Blame blame,
                                       const CallDescriptor* other = nullptr, uint64_t sends = 0,
                                       uint64_t expects = 0) {
    poison_ =
        failure == Failure::timeout ? kFailed + 1 + static_cast<uint32_t>(blame.peer) : kFailed;
    if (atomicCAS(&call_.header()->noted, 0u, 1u) != 0) return;
    poison_ |= kReporter;
    block_note() = {failure, phase, blame, other, sends, expects};
  }

  /// Returns false for all threads of the block if one of them has failed.
  __device__ bool agree() {
    if (__syncthreads_or(!alive()) != 0 && alive()) poison_ = kFailed;
    return alive();
  }

  /// Polls `ready()` until it is true, the timeout expires or the communicator is poisoned.
  /// `blame()` returns the missing peer. The lanes of a warp may leave at different times: no
  /// shuffle may follow without a __syncwarp (hazard 2).
  template <typename Ready, typename GetBlame>
  __device__ __forceinline__ bool wait(Phase phase, Ready ready, GetBlame blame) {
    return wait(phase, ready, blame, [] { return false; });
  }
  /// `moved()`: whether anything has arrived since its last call. If so, the timeout starts anew.
  template <typename Ready, typename GetBlame, typename Moved>
  __device__ __forceinline__ bool wait(Phase phase, Ready ready, GetBlame blame, Moved moved) {
    if (!alive()) return false;
    uint64_t began = 0;
    for (uint32_t polls = 1; !ready(); ++polls) {
      if (polls % kPollsPerLook != 0) continue;
      if (alive()) {
        poison_ = ptx::ld_relaxed_sys(&call_.header()->poison);
        const uint64_t now = ptx::globaltimer();
        if (began == 0 || moved()) began = now;
        // If poisoned: what does not arrive within a few more polls has not been sent.
        if (!alive() || now - began < call_.timeout_ns) continue;
      }
      fail(Failure::timeout, phase, blame());
      return false;
    }
    return true;
  }

  /// Called at the end of a kernel by all threads of a block in which a thread has failed.
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
  static constexpr uint32_t kPollsPerLook = 128;  // at most about 100 us of polling
  // Values of poison_ that differ from every peer's: this thread has failed, plus 1 + the rank that
  // it waited for; kReporter: it also reports the note.
  static constexpr uint32_t kFailed = 0x100;
  static constexpr uint32_t kReporter = 0x200;

  const KernelCall& call_;
  uint32_t poison_;
};

}  // namespace collx::cuda
