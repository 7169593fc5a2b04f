// One meeting of all ranks of a group through its store: in each step every rank publishes a
// message and collects everybody's. The bounded counterpart of an all-gather of objects.
//
// KEYS are collx/symm_mem/<group>/<meeting>/<step>/<rank>. The number of the meeting is counted in
// the store itself, per rank, so it is as old as the store: a process group that is destroyed and
// made anew meets no leftovers. Ranks call collectively, so their counts agree; one that was left
// out of a failed meeting by an error of its own is in step again with the next.
//
// FAILURE. A rank that gives up publishes the cause instead of its messages, so that the others, a
// late one too, raise at once instead of waiting for their deadlines.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "deadline.h"

namespace collx::memory {

struct Group {
  std::string name;
  int rank;
  int world;
  c10::intrusive_ptr<c10d::Store> store;
};

/// The process group of that name, or what set_group_info() said. Throws c10::Error for neither.
Group find_group(const std::string& name);

/// The steps of a meeting, in order.
enum class Step { offer, verdict };

class Meeting {
 public:
  explicit Meeting(const Group& group);

  /// Publishes `message` and returns every rank's, by rank. Throws c10::Error naming the rank that
  /// did not come before the deadline, or that gave up and why.
  std::vector<std::string> all_gather(Step step, const std::string& message);

  /// The reason of a rank that has already given up in this meeting, "" if there is none. A failure
  /// that this rank sees elsewhere is often but the consequence. Never throws, hardly waits.
  std::string reported() noexcept;

  /// Tells peers that wait, now or later, why this rank left. Never throws.
  void give_up(const std::string& reason) noexcept;

  /// After the last step: removes what no rank will read any more. Never throws.
  void clean_up() noexcept;

  Deadline deadline() const { return deadline_; }

 private:
  std::string key(int64_t meeting, Step step, int rank) const;
  std::string collect(Step step, int rank);

  const Group& group_;
  std::chrono::milliseconds timeout_;
  Deadline deadline_;
  int64_t number_;
};

}  // namespace collx::memory
