// One rank's view of a communicator, as the operators use it.
//
// OWNERSHIP  The regions belong to Python objects, which keep them mapped while this object is
// alive. Neither destroy() nor the destructor waits for a peer.
// THREADS    lock() is held from the lookup of symmetric tensors to the launch (on the CPU: to the
// end of the call). Failure and state are atomics, which can be read without the lock.
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
#include "../protocol/progress.h"
#include "../protocol/selection.h"
#include "../protocol/tuning.h"
#include "call_log.h"
#include "host_status.h"
#include "posting.h"
#include "symmetric.h"
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
  std::vector<uint64_t> regions;  // addresses of all ranks' regions here; empty: fallback only
  uint64_t payload_bytes;
  int64_t timeout_ms;  // until set_timeout()
  PdlLevel pdl;
  bool check;
  int blocks;
  int spare_blocks;  // additional blocks while no other communicator is on the device
  Capabilities capabilities = {};
  uint64_t multicast = 0;  // multicast address of the regions of all ranks; 0 if there is none
  std::string multicast_unavailable_reason;  // empty if there is one
  bool simulated = false;                    // CudaView::simulated
  bool deterministic = true;
  bool overlap = false;  // leave multiprocessors to other work: use copy engines where possible
  bool watchdog = false;
  TuningTable tuning = {};                 // the same on every rank
  std::vector<int64_t> global_ranks = {};  // ranks in the default process group; empty: not known
  /// The c10d::ProcessGroup for the fallback; null: the group named `group_name`. The static type
  /// differs because the header of ProcessGroup takes long to compile.
  c10::intrusive_ptr<c10::intrusive_ptr_target> fallback_group = {};
};

/// Raises unless this build supports the device.
void check_device(c10::Device device);
void check_world(c10::DeviceType device, int world_size);

/// The layouts, which every rank computes equally. Raises ValueError if a region would be too
/// small.
CpuLayout require_cpu_layout(int world_size, uint64_t payload_bytes);
CudaLayout require_cuda_layout(int world_size, uint64_t payload_bytes);

class C10_EXPORT Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// Checks the options (raises ValueError) and enters the communicator into the registry.
  static std::shared_ptr<Communicator> create(CommunicatorOptions options);

  explicit Communicator(CommunicatorOptions options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const CommunicatorOptions& options() const { return options_; }
  bool has_regions() const { return !options_.regions.empty(); }
  bool on_cuda() const { return options_.device.is_cuda(); }

  /// Raises if calls are refused: in a forked child, after destroy(), or after a failure. The first
  /// error raised after a failure is the failure itself.
  void require_usable(const char* op);
  /// Raises the error of a call that has been refused.
  [[noreturn]] void raise_refused(const char* op);
  void refuse_if_destroyed(const char* op) const;
  /// Raises in a forked child. There, a thread that the child lacks may hold the lock, and the
  /// store must not be used, because the child shares its connection with the parent.
  void refuse_if_forked(const char* op) const;
  /// Raises the recorded failure as its own error class, on each call; after destroy() raises
  /// CommunicatorPoisoned. `detail` is appended to the message. Without `wait`, it does not wait
  /// for the peers' notes about a timeout, and may name a rank that itself waits for another rank.
  void check(const char* op, const std::string& detail = {}, bool wait = true);
  /// Raises a failure that is already known, without waiting. For waits for posted calls.
  void check_posted(const char* op) {
    if (destroyed() || status_.ready()) [[unlikely]]
      check(op, {}, /*wait=*/false);
  }
  std::optional<StatusRecord> failure() const;
  bool destroyed() const { return destroyed_.load(std::memory_order_acquire); }
  bool forked() const;

  /// The view that a call passes to the backend, with the current level of dependent launch.
  CpuView cpu_view() const {
    CpuView view{view_, cpu_layout_};
    view.timeout_ns = timeout_ns();
    return view;
  }
  CudaView cuda_view() const;
  const CpuLayout& cpu_layout() const { return cpu_layout_; }
  const CudaLayout& cuda_layout() const { return cuda_layout_; }
  PdlLevel pdl() const { return pdl_.load(std::memory_order_relaxed); }
  /// The level stays "off" unless the device of every rank supports dependent launch.
  void set_pdl(PdlLevel level) {
    const bool able = options_.capabilities.dependent_launch;
    pdl_.store(able ? level : PdlLevel::off, std::memory_order_relaxed);
  }

  /// Whether results are reduced in the order of the ranks, unless a call names an algorithm with a
  /// different order. The value must be the same on every rank.
  bool deterministic() const { return deterministic_.load(std::memory_order_relaxed); }
  void set_deterministic(bool is) { deterministic_.store(is, std::memory_order_relaxed); }

  /// The reason why NVLink multicast is unavailable, the same on all ranks. Empty if it is
  /// available.
  const std::string& multicast_unavailable_reason() const {
    return options_.multicast_unavailable_reason;
  }

  /// The table that replaces built-in choices of "auto". It is immutable because graphs contain its
  /// choices.
  const TuningTable& tuning() const { return options_.tuning; }

  /// For tuners: sets the grid that later CUDA calls use instead of the selected one; zeros restore
  /// the selection. The values must be the same on every rank. Raises ValueError unless all blocks
  /// can be resident at once.
  void tune(int blocks, int threads);
  /// The selected plan, or the tuner's.
  Plan tuned(Plan plan) const;
  int tuned_blocks() const { return tuned_blocks_; }
  int tuned_threads() const { return tuned_threads_; }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  /// Sets the timeout of later calls. Waits for a CPU call that is in progress.
  void set_timeout(int64_t milliseconds);
  /// Additional blocks that no other communicator on the device currently relies on.
  int spare_blocks() const;

  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  SymmetricMemory& symmetric() { return symmetric_; }
#if COLLX_CUDA
  StreamOrder& streams() { return *streams_; }
  cuda::CopyStreams& copy_streams() { return *copy_streams_; }
#endif

  /// Created on first use.
  Poster& poster();
  /// Called before a call that is not posted: calls already posted on the CPU run first.
  void let_posted_calls_pass() {
    if (Poster* const poster = poster_.load(std::memory_order_acquire)) poster->let_pass();
  }

  /// Calls that this process has enqueued on the communicator, without replays of graphs. See
  /// Ticket.
  uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  void count_call() { calls_.fetch_add(1, std::memory_order_relaxed); }

  CallLog& log() { return log_; }
  /// The progress of a rank. Requires regions; must not be called after destroy().
  Progress progress_of(int rank) const;
  /// The progress of all ranks. Empty without regions and after destroy(). Any thread may call it
  /// at any time, also during destroy().
  std::vector<Progress> progress();
  /// Whether graphs have captured calls. The host does not count their replays.
  bool has_captured() const;
  /// Nanoseconds that calls of this rank have waited for each rank. Empty on CUDA without a
  /// watchdog, without regions, and after destroy(). Any thread may call it at any time.
  std::vector<uint64_t> waited();
  /// Whether the watchdog samples how long kernels wait, since they do not measure it.
  bool samples_waits() const;
  /// Adds to the time that this rank has waited for each of the ranks in the bit mask.
  void add_wait(uint32_t ranks, std::chrono::nanoseconds time);

  /// The record of a failure that the host detected in the next call.
  StatusRecord begin_record(Failure failure, Phase phase) const;
  /// Records a failure that the host detected, and reports it to the peers if there are regions.
  void report(const StatusRecord& record);
  /// Reports that the program of this rank has aborted its calls.
  void abort();
  /// Aborts if destroy() would wait for posted calls. A call through the process group continues
  /// until its own timeout.
  void abort_posted();

  /// Leaves the registry. Waits only for posted calls on the CPU and for calls of other threads of
  /// this process, whose waits are bounded.
  void destroy();

 private:
  /// Adopts a failure that a peer has reported while no call of this rank could detect it.
  void adopt_reported();
  /// Returns the first failure, with the rank to blame as far as it is known (protocol/blame.h).
  /// `wait`: allows the other ranks the grace period to leave their notes.
  std::optional<StatusRecord> follow_blame(bool wait);
  /// Regions that are not released yet remain while the result exists.
  std::unique_lock<std::mutex> keep_regions();
  int most_blocks(int threads) const;
  /// The timeout of a view. Any thread may call this, also during set_timeout().
  uint64_t timeout_ns() const {
    return static_cast<uint64_t>(std::chrono::nanoseconds(timeout()).count());
  }
  std::string describe_failure(const StatusRecord& record) const;

  CommunicatorOptions options_;
  RankView view_{};           // without the timeout, which may change
  CpuLayout cpu_layout_{};    // on CPU
  CudaLayout cuda_layout_{};  // on CUDA
  StatusBlock status_;
  StatusRecord verdict_;  // CUDA: the final failure, once `followed_`
  std::atomic<bool> followed_{false};
  std::mutex verdict_mutex_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<PdlLevel> pdl_;
  std::atomic<bool> deterministic_;
  int tuned_blocks_ = 0;
  int tuned_threads_ = 0;
  std::atomic<bool> failure_raised_{false};
  std::atomic<bool> destroyed_{false};
  std::atomic<bool> status_given_back_{false};
  std::atomic<uint64_t> calls_{0};
  CallLog log_;
  int fork_generation_;
  std::atomic<Poster*> poster_{nullptr};  // owned
  std::mutex mutex_;
  // Held while a thread that makes no call accesses the regions, and by destroy(), after which they
  // are released. Calls hold `mutex_` instead, while they wait for their peers.
  std::mutex reporting_;
  SymmetricMemory symmetric_;
#if COLLX_CUDA
  std::unique_ptr<StreamOrder> streams_ = std::make_unique<StreamOrder>();
  std::unique_ptr<cuda::CopyStreams> copy_streams_ = std::make_unique<cuda::CopyStreams>();
#endif
};

}  // namespace collx
