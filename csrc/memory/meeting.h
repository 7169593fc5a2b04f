// A meeting of all ranks of a group through its store. In each step, every rank publishes a message
// and collects those of all ranks. It is an all-gather of objects with a time limit.
//
// KEYS are collx/symm_mem/<group>/<meeting>/<step>/<rank>. The store counts the number of the
// meeting for each rank. The count has the lifetime of the store, so a process group that is
// destroyed and created again finds no old keys. Ranks call collectively, so their counts agree. A
// rank that missed a failed meeting because of its own error agrees again in the next meeting.
//
// FAILURE. A rank that fails publishes the cause instead of its messages. The other ranks raise as
// soon as they read it, even if they arrive late, and do not wait for their deadlines.
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

/// The process group of that name, or the group that set_group_info() registered. Throws c10::Error
/// if there is neither.
Group find_group(const std::string& name);

/// The steps of a meeting, in order.
enum class Step { offer, verdict };

class Meeting {
 public:
  explicit Meeting(const Group& group);

  /// Publishes `message` and returns those of all ranks, by rank. Throws c10::Error, which names
  /// the rank that did not arrive before the deadline, or the rank that gave up and its reason.
  std::vector<std::string> all_gather(Step step, const std::string& message);

  /// The reason of a rank that has already given up in this meeting, or "". A failure that this
  /// rank observes elsewhere is often only the consequence. Never throws, and does not wait for
  /// ranks.
  std::string reported() noexcept;

  /// Publishes why this rank left, for peers that wait now or later. Never throws.
  void give_up(const std::string& reason) noexcept;

  /// Called after the last step. Removes keys that no rank will read any more. Never throws.
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
