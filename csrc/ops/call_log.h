// The last calls of a communicator and counts of its calls: for error reports, for the watchdog,
// and to find a slow rank.
//
// THREADS  One thread at a time writes, under the communicator's lock. Any thread reads without the
// lock, since a failed call may still hold it. A reader skips an entry that changes during the
// read.
#pragma once

#include <c10/macros/Export.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../protocol/status.h"

namespace collx {

struct LoggedCall {
  const char* op;      // lives as long as the process
  int64_t created_ns;  // Unix time at which the host began the call
  uint64_t input_bytes;
  CallDescriptor call;
};

class C10_EXPORT CallLog {
 public:
  static constexpr uint64_t kKept = 1000;

  struct Tally {
    const char* op;
    uint64_t calls;
    uint64_t bytes;  // of this rank's inputs
  };

  /// Marks, during its lifetime, that the process group executes the call.
  class InGroup {
   public:
    explicit InGroup(CallLog& log) : log_(log) { set(true); }
    ~InGroup() { set(false); }
    InGroup(const InGroup&) = delete;
    InGroup& operator=(const InGroup&) = delete;

   private:
    void set(bool is) { log_.in_group_.store(is, std::memory_order_release); }
    CallLog& log_;
  };

  CallLog() : slots_(new Slot[kKept]) {}

  /// `number`: how many calls precede this one.
  void begin(uint64_t number, const char* op, uint64_t input_bytes, const CallDescriptor& call);

  bool in_group() const { return in_group_.load(std::memory_order_acquire); }
  /// Returns nullopt for a call that is no longer in the log.
  std::optional<LoggedCall> find(uint64_t number) const;
  std::vector<Tally> tallies() const;

 private:
  static constexpr size_t kWords = sizeof(LoggedCall) / sizeof(uint64_t);
  static_assert(sizeof(LoggedCall) % sizeof(uint64_t) == 0);

  struct Slot {
    std::atomic<uint64_t> number{~uint64_t{0}};
    std::array<std::atomic<uint64_t>, kWords> words{};
  };
  struct Count {
    std::atomic<const char*> op{nullptr};
    std::atomic<uint64_t> calls{0}, bytes{0};
  };

  void count(const char* op, uint64_t bytes);

  const std::unique_ptr<Slot[]> slots_;
  std::array<Count, 64> counts_;  // in the order of first use; more than there are operators
  std::atomic<bool> in_group_{false};
};

}  // namespace collx
