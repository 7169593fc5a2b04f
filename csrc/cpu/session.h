// One call of one rank: entry and exit, the uses of an area, and every wait.
//
// USAGE
//     Session session(view, call);
//     if (!session.enter()) return false;
//     const Use use = session.next_use(Area::pull);
//     if (!session.claim(use)) return false;
//     ... write what peers read ...
//     session.publish_all(use);
//     if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
//     session.settle(use);
//     return session.complete();
//
// A wait that fails has left its note at every rank, and the caller no longer accesses any peer.
//
// TWO SLOTS SUFFICE for any sequence of uses, independent of which ranks wait for which: a use
// overwrites the data that peers read in the use two before it. Each peer publishes its last word
// of the use in between after that read, in every use, even if it has no data. claim() waits for
// all of these words first. A rank that writes nothing need not claim. If all ranks wait for all
// others, the words have already been seen, and claim() costs nothing: settle() has recorded it.
#pragma once

#include "../protocol/partition.h"
#include "control.h"
#include "mutants.h"

namespace collx::cpu {

/// One use of an area.
struct Use {
  Area area;
  uint32_t epoch;
  uint32_t parity() const { return mutant(Mutant::one_slot) ? 0 : epoch & 1; }
};

class Session {
 public:
  Session(const CpuView& view, const Call& call) : view_(view), call_(call) {}
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const CpuView& view() const { return view_; }
  const CpuLayout& layout() const { return view_.layout; }
  int rank() const { return view_.rank; }
  int world() const { return view_.world; }
  /// The rank `step` places after this one. Loops in this order prevent all ranks from loading from
  /// the same peer at once.
  int neighbor(int step) const { return (rank() + step) % world(); }

  /// Returns false on a poisoned communicator, or if a second thread is inside a call on it
  /// (hazard 1).
  bool enter();
  /// Counts the call as completed. Returns false if this call accessed tensors of peers and a rank
  /// has failed: a rank that was paused may have read tensors that the peers had given up and
  /// changed.
  bool complete();
  /// Returns false and ends this call if a rank has failed. Call it before stores to peers' tensors
  /// that no wait precedes.
  bool alive() const;

  /// For a call whose ranks do not know each other's numbers of bytes to send and receive. The
  /// arrays are by rank and must outlive the call. Fingerprints and reports then describe the pair.
  void set_counts(const uint64_t* sends, const uint64_t* expects) {
    sends_ = sends;
    expects_ = expects;
  }
  /// `peer` is -1 in a record of a rank that was not waiting.
  CallDescriptor descriptor(int peer) const;

  /// Exchanges the descriptors of the calls. Any difference fails on all ranks. Afterwards all
  /// ranks have entered this call.
  bool meet(Phase phase);

  Use next_use(Area area);
  /// Waits until no peer still reads the data that this rank wrote two uses before.
  bool claim(Use use);
  /// Records that every peer's last word of this use has been seen.
  void settle(Use use);
  void publish(Use use, Word word);
  /// Publishes all words of a use at once, for uses in which they mean the same.
  void publish_all(Use use);
  /// Waits until the peer has published the word for this use.
  bool await_from(int peer, Use use, Word word, Phase phase);
  /// The same for every peer.
  bool await(Use use, Word word, Phase phase);
  /// Returns when all ranks have entered the call, with equal descriptors.
  bool start_barrier() {
    return mutant(Mutant::no_opening_barrier) || view_.check || meet(Phase::start_barrier);
  }
  /// Returns when all ranks have called it.
  bool barrier(Phase phase);
  /// Returns when no peer still uses this rank's tensors (hazard 11).
  bool end_barrier() { return barrier(Phase::end_barrier); }

  /// A record of a failure in `phase`, for report().
  StatusRecord record(Failure failure, Phase phase, int peer) const;

  /// Addresses in the call's tensors, by byte.
  const char* input(uint64_t at = 0) const { return static_cast<const char*>(call_.input) + at; }
  char* output(uint64_t at = 0) const { return static_cast<char*>(call_.output) + at; }
  const char* peer_input(int of, uint64_t at = 0) const {
    return static_cast<const char*>(call_.peer_input[of]) + at;
  }
  char* peer_output(int of, uint64_t at = 0) const {
    return static_cast<char*>(call_.peer_output[of]) + at;
  }
  /// Whether peers pull this call's inputs from the staging memory.
  bool staged() const { return call_.plan.staged; }
  bool outputs_symmetric() const { return call_.peer_output[rank()] != nullptr; }

  /// Addresses in the region of rank `of`, as mapped in this process.
  char* oneshot_slot(int of, Use use, int source) const;
  char* twoshot_slot(int of, Use use, int stage, int source) const;
  char* staging(int of, Use use) const;
  char* results(int of, Use use) const;
  Counts counts(int of, Use use) const;

 private:
  Control& control(int of) const { return control_of(view_.region[of], view_.layout); }
  /// Whether ranks may access each other's tensors in this call.
  bool shares_tensors() const {
    return call_.peer_input[rank()] != nullptr || call_.peer_output[rank()] != nullptr;
  }
  uint32_t fingerprint_for(int peer, uint32_t call) const;
  void push_descriptor(int to, uint32_t epoch, uint32_t call) const;
  bool compare_with(int peer, uint32_t epoch, uint32_t call, Phase phase);
  /// Waits for `read()`, an epoch that `peer` publishes, to reach `expected`.
  template <typename Read>
  bool wait(int peer, Read read, uint32_t expected, Phase phase);

  const CpuView& view_;
  const Call& call_;
  const uint64_t* sends_ = nullptr;
  const uint64_t* expects_ = nullptr;
  bool entered_ = false;
};

/// A call of one kind in progress.
template <typename C>
class SessionOf : public Session {
 public:
  SessionOf(const CpuView& view, const C& call) : Session(view, call), call_(call) {}
  const C& call() const { return call_; }

 private:
  const C& call_;
};

}  // namespace collx::cpu
