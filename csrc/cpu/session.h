// One call of one rank: entry and exit, the uses of a channel, and every wait.
//
// USAGE
//     Session session(view, call);
//     if (!session.enter()) return false;
//     const Use use = session.next_use(Channel::pull);
//     ... write what peers read ...
//     session.publish(use, Word::arrived);
//     if (!session.await(use, Word::arrived, Phase::stage_barrier)) return false;
//     session.complete();
//
// A wait that fails has left its report with every rank, and the caller touches no peer any more.
#pragma once

#include "../protocol/partition.h"
#include "control.h"

namespace collx::cpu {

/// One use of a channel's memory.
struct Use {
  Channel channel;
  uint32_t epoch;
  uint32_t parity() const { return epoch & 1; }
};

class Session {
 public:
  Session(const RankView& view, const AllreduceCall& call) : view_(view), call_(call) {}
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const RankView& view() const { return view_; }
  const AllreduceCall& call() const { return call_; }
  const RegionLayout& layout() const { return view_.layout; }
  int rank() const { return view_.rank; }
  int world() const { return view_.world; }
  uint64_t element() const { return static_cast<uint64_t>(dtype_size(call_.dtype)); }

  /// False on a poisoned communicator, or when a second thread is inside one (hazard 1).
  bool enter();
  /// Counts the call as completed.
  void complete();

  /// Exchanges what the ranks are about to do; any difference fails on all of them. Afterwards all
  /// ranks have entered this call.
  bool meet(Phase phase);

  Use next_use(Channel channel);
  void publish(Use use, Word word);
  /// In a use whose channel has words that nobody awaits this time.
  void publish_all(Use use);
  /// Waits until every peer has published the word for this use.
  bool await(Use use, Word word, Phase phase);
  /// Returns when all ranks have entered the call, with equal descriptors.
  bool start_barrier() { return view_.check || meet(Phase::start_barrier); }
  /// Returns when no peer uses this rank's tensors any more (hazard 11).
  bool end_barrier();

  /// Addresses in the region of rank `of`, as mapped here.
  char* oneshot_slot(int of, Use use, int source) const;
  char* twoshot_slot(int of, Use use, int stage, int source) const;
  char* staging(int of, Use use) const;
  char* results(int of, Use use) const;

  const char* input(uint64_t index) const {
    return static_cast<const char*>(call_.input) + index * element();
  }
  char* output(uint64_t index) const {
    return static_cast<char*>(call_.output) + index * element();
  }
  const char* peer_input(int of, uint64_t index) const {
    return static_cast<const char*>(call_.peer_input[of]) + index * element();
  }
  char* peer_output(int of, uint64_t index) const {
    return static_cast<char*>(call_.peer_output[of]) + index * element();
  }
  /// Whether peers read this call's inputs where they lie.
  bool inputs_symmetric() const { return call_.peer_input[view_.rank] != nullptr; }

 private:
  Control& control(int of) const { return control_of(view_.region[of], view_.layout); }
  void push_descriptor(int to, uint32_t epoch, uint64_t flag) const;
  bool compare_with(int peer, uint32_t epoch, uint32_t own, Phase phase);
  /// Waits for `read()`, a 64-bit word of `peer`, to show `expected`.
  template <typename Read>
  bool wait(int peer, Read read, uint32_t expected, Phase phase);
  StatusRecord record(Failure failure, Phase phase, int peer) const;

  const RankView& view_;
  const AllreduceCall& call_;
  bool entered_ = false;
};

}  // namespace collx::cpu
