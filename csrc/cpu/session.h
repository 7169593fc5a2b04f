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
//     session.complete();
//
// A wait that fails has left its note with every rank, and the caller touches no peer any more.
//
// TWO SLOTS SUFFICE in any sequence of uses, whichever ranks wait for which: a use overwrites what
// peers read in the use two before. Each of them publishes its last word of the use between after
// that reading, in every use, whether or not it has data; and claim() sees all of these words
// first. Whoever writes nothing claims nothing. Where all ranks wait for all, the words have been
// seen already, and claim() costs nothing: settle() has noted it.
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
  /// The rank that many places after this one. Ranks that follow the ring do not all load the same
  /// peer at once.
  int neighbor(int step) const { return (rank() + step) % world(); }

  /// False on a poisoned communicator, or when a second thread is inside one (hazard 1).
  bool enter();
  /// Counts the call as completed.
  void complete();
  /// False, and this call's end, once a rank has failed: before stores to peers' tensors that no
  /// wait precedes.
  bool alive() const;

  /// In a call whose ranks do not have each other's numbers of bytes to send and receive: by rank,
  /// and to be kept. Fingerprints and reports then describe the pair.
  void set_counts(const uint64_t* sends, const uint64_t* expects) {
    sends_ = sends;
    expects_ = expects;
  }
  CallDescriptor descriptor(int peer) const;

  /// Exchanges what the ranks are about to do; any difference fails on all of them. Afterwards all
  /// ranks have entered this call.
  bool meet(Phase phase);

  Use next_use(Area area);
  /// Waits until no peer reads any more what this rank wrote two uses before.
  bool claim(Use use);
  /// Every peer's last word of this use has been seen.
  void settle(Use use);
  void publish(Use use, Word word);
  /// In a use whose words all say the same.
  void publish_all(Use use);
  /// Waits until the peer has published the word for this use.
  bool await_from(int peer, Use use, Word word, Phase phase);
  /// The same for every peer.
  bool await(Use use, Word word, Phase phase);
  /// Returns when all ranks have entered the call, with equal descriptors.
  bool start_barrier() {
    return mutant(Mutant::no_opening_barrier) || view_.check || meet(Phase::start_barrier);
  }
  /// Returns when all ranks have come here.
  bool barrier(Phase phase);
  /// Returns when no peer uses this rank's tensors any more (hazard 11).
  bool end_barrier() { return barrier(Phase::end_barrier); }

  /// What `phase` failed of, to be given to report().
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
  /// Where peers pull this call's inputs from.
  bool staged() const { return call_.plan.staged; }
  bool outputs_symmetric() const { return call_.peer_output[rank()] != nullptr; }

  /// Addresses in the region of rank `of`, as mapped here.
  char* oneshot_slot(int of, Use use, int source) const;
  char* twoshot_slot(int of, Use use, int stage, int source) const;
  char* staging(int of, Use use) const;
  char* results(int of, Use use) const;
  Counts counts(int of, Use use) const;

 private:
  Control& control(int of) const { return control_of(view_.region[of], view_.layout); }
  uint32_t fingerprint_for(int peer, uint32_t call) const;
  void push_descriptor(int to, uint32_t epoch, uint32_t call) const;
  bool compare_with(int peer, uint32_t epoch, uint32_t call, Phase phase);
  /// Waits for `read()`, a 64-bit word of `peer`, to show `expected`.
  template <typename Read>
  bool wait(int peer, Read read, uint32_t expected, Phase phase);

  const CpuView& view_;
  const Call& call_;
  const uint64_t* sends_ = nullptr;
  const uint64_t* expects_ = nullptr;
  bool entered_ = false;
};

/// A call of one kind under way.
template <typename C>
class SessionOf : public Session {
 public:
  SessionOf(const CpuView& view, const C& call) : Session(view, call), call_(call) {}
  const C& call() const { return call_; }

 private:
  const C& call_;
};

}  // namespace collx::cpu
