// One rank's view of a communicator, as the operators use it.
//
// OWNERSHIP  The regions belong to the Python side, which keeps them mapped as long as this object
// lives. Nothing in here waits for a peer: neither destroy() nor the destructor.
// THREADS    lock() is held from the look-up of symmetric tensors to the launch (on CPU: to the
// end of the call). Failure and state are atomics, readable without it.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Export.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../protocol/call.h"
#include "../protocol/selection.h"
#include "host_status.h"
#include "posting.h"
#include "symmetric.h"
#include "watchdog.h"
#if COLLX_CUDA
#include "../cuda/copy_streams.h"
#include "streams.h"
#endif

namespace collx {

struct CommunicatorOptions {
  std::string name;
  std::string group_name;
  c10::Device device;
  int rank;
  int world_size;
  std::vector<uint64_t> regions;  // every rank's, as mapped here; empty: fallback only
  uint64_t payload_bytes;
  int64_t timeout_ms;  // until set_timeout()
  PdlLevel pdl;
  bool check;
  int blocks;
  int spare_blocks;  // additional ones while no other communicator is on the device
  Capabilities capabilities = {};
  uint64_t multicast = 0;  // the regions of all ranks at one address; 0: there is no such address
  std::string multicast_unavailable_reason;  // empty if there is one
  bool simulated = false;                    // CudaView::simulated
  bool deterministic = true;
  bool overlap = false;  // multiprocessors are left to other work: copy engines where they can
  bool watchdog = false;
  /// A c10d::ProcessGroup that serves the fallback; null: the group of `group_name` does. Not the
  /// type itself, whose header takes long to compile.
  c10::intrusive_ptr<c10::intrusive_ptr_target> fallback_group = {};
};

/// The layouts, as every rank computes them. ValueError where a region would be too small.
CpuLayout require_cpu_layout(int world_size, uint64_t payload_bytes);
CudaLayout require_cuda_layout(int world_size, uint64_t payload_bytes);

class C10_EXPORT Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// Checks the options (ValueError) and enters the communicator into the registry.
  static std::shared_ptr<Communicator> create(CommunicatorOptions options);

  explicit Communicator(CommunicatorOptions options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const CommunicatorOptions& options() const { return options_; }
  bool has_regions() const { return !options_.regions.empty(); }
  bool on_cuda() const { return options_.device.is_cuda(); }

  /// Raises when calls are refused: in a forked child, after destroy(), after a failure. The first
  /// refusal after a failure is the failure itself.
  void require_usable(const char* op);
  void refuse_if_destroyed(const char* op) const;
  /// Raises the failure that was recorded, by its own class, each time; CommunicatorPoisoned after
  /// destroy(). `detail` is added to the words. Without `wait` it waits for no peer to say more of
  /// a time-out, and may then name a rank that itself waits for another one.
  void check(const char* op, const std::string& detail = {}, bool wait = true);
  /// Raises what is known, at once: for a posted call that somebody waits for.
  void check_posted(const char* op) {
    if (destroyed() || status_.ready()) [[unlikely]]
      check(op, {}, /*wait=*/false);
  }
  std::optional<StatusRecord> failure() const;
  bool destroyed() const { return destroyed_.load(std::memory_order_acquire); }
  bool forked() const;

  /// What a call hands to the backend, with the level of dependent launch that applies now.
  CpuView cpu_view() const { return {view_, cpu_layout_}; }
  CudaView cuda_view() const;
  const CpuLayout& cpu_layout() const { return cpu_layout_; }
  const CudaLayout& cuda_layout() const { return cuda_layout_; }
  PdlLevel pdl() const { return pdl_.load(std::memory_order_relaxed); }
  /// "off" it stays where not every rank's device has dependent launch.
  void set_pdl(PdlLevel level) {
    const bool able = options_.capabilities.dependent_launch;
    pdl_.store(able ? level : PdlLevel::off, std::memory_order_relaxed);
  }

  /// Whether results are reduced in the order of the ranks, unless a call names an algorithm
  /// with another one. An agreed value: the same on every rank.
  bool deterministic() const { return deterministic_.load(std::memory_order_relaxed); }
  void set_deterministic(bool is) { deterministic_.store(is, std::memory_order_relaxed); }

  /// Why there is no NVLink multicast: the same on all ranks. Empty if there is.
  const std::string& multicast_unavailable_reason() const {
    return options_.multicast_unavailable_reason;
  }

  /// For tuners: the grid that later calls on CUDA use instead of the selected one; zeros
  /// give the choice back. An agreed value: the same on every rank. ValueError unless all blocks
  /// can be resident at once.
  void tune(int blocks, int threads);
  /// The selected plan, or the tuner's.
  Plan tuned(Plan plan) const;
  int tuned_blocks() const { return tuned_blocks_; }
  int tuned_threads() const { return tuned_threads_; }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  /// Of the calls that follow. Waits for a call on the CPU that is under way.
  void set_timeout(int64_t milliseconds);
  /// Blocks that no other communicator of the device currently relies on.
  int spare_blocks() const;

  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  SymmetricMemory& symmetric() { return symmetric_; }
#if COLLX_CUDA
  StreamOrder& streams() { return streams_; }
  cuda::CopyStreams& copy_streams() { return copy_streams_; }
#endif

  /// Created at its first use.
  Poster& poster();
  /// Before a call that is not posted: those that are posted on the CPU come first.
  void let_posted_calls_pass() {
    if (Poster* const poster = poster_.load(std::memory_order_acquire)) poster->let_pass();
  }

  /// Calls that this process made through the communicator, replays of graphs not counted. A call
  /// counts when it is enqueued: see Ticket.
  uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  void count_call() { calls_.fetch_add(1, std::memory_order_relaxed); }

  /// What the watchdog reads; null unless the communicator has one.
  CallMarks* marks() { return marks_.get(); }

  /// Records a failure that the host detected, here and, if there are regions, at the peers.
  void report(const StatusRecord& record);

  /// Leaves the registry. Waits for nothing but posted calls on the CPU and calls of this process's
  /// other threads, whose waits are bounded.
  void destroy();

 private:
  /// Adopts a failure that a peer has reported while no call of this rank could detect it.
  void adopt_reported();
  /// Determines which rank to name (protocol/blame.h), until that is final.
  void follow_blame(bool wait);
  int most_blocks(int threads) const;
  std::string describe_failure(const StatusRecord& record) const;

  CommunicatorOptions options_;
  RankView view_{};
  CpuLayout cpu_layout_{};    // on CPU
  CudaLayout cuda_layout_{};  // on CUDA
  StatusBlock status_;
  StatusRecord verdict_;  // CUDA: the final failure, once `followed_`
  std::atomic<bool> followed_{false};
  std::mutex verdict_mutex_;
  std::atomic<int64_t> timeout_ms_;  // what the views have, for those who do not hold the lock
  std::atomic<PdlLevel> pdl_;
  std::atomic<bool> deterministic_;
  int tuned_blocks_ = 0;
  int tuned_threads_ = 0;
  std::atomic<bool> failure_raised_{false};
  std::atomic<bool> destroyed_{false};
  std::atomic<bool> status_given_back_{false};
  std::atomic<uint64_t> calls_{0};
  const std::unique_ptr<CallMarks> marks_;
  int fork_generation_;
  std::atomic<Poster*> poster_{nullptr};  // owned
  std::mutex mutex_;
  SymmetricMemory symmetric_;
#if COLLX_CUDA
  StreamOrder streams_;
  cuda::CopyStreams copy_streams_;
#endif
};

}  // namespace collx
