#include "communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "../cpu/failure.h"
#include "../protocol/cpu_layout.h"
#include "../protocol/selection.h"
#include "call.h"
#include "errors.h"
#include "registry.h"
#include "watchdog.h"
#if COLLX_CUDA
#include "../cuda/device.h"
#endif

namespace collx {

namespace {

void check_options(const CommunicatorOptions& o) {
  TORCH_CHECK_VALUE(!o.name.empty(), "collx: name: got \"\"; accepted: any other string");
  check_device(o.device);
  TORCH_CHECK_VALUE(o.device.is_cpu() || o.device.has_index(), "collx: device: got ", o.device,
                    "; a CUDA device needs its index");
  check_world(o.device.type(), o.world_size);
  TORCH_CHECK_VALUE(o.rank >= 0 && o.rank < o.world_size, "collx: rank: got ", o.rank,
                    "; accepted: 0 to ", o.world_size - 1);
  TORCH_CHECK_VALUE(o.regions.empty() || o.regions.size() == static_cast<size_t>(o.world_size),
                    "collx: regions: got ", o.regions.size(), " for ", o.world_size, " ranks");
  TORCH_CHECK_VALUE(o.timeout_ms > 0, "collx: timeout_ms: got ", o.timeout_ms,
                    "; accepted: 1 or more");
  TORCH_CHECK_VALUE(o.spare_blocks >= 0, "collx: spare_blocks: got ", o.spare_blocks,
                    "; accepted: 0 or more");
  TORCH_CHECK_VALUE(
      !o.multicast_unavailable_reason.empty() || (o.multicast != 0 && o.device.is_cuda()),
      "collx: multicast: got no address on ", o.device, ", and no reason why");
  TORCH_CHECK_VALUE(o.blocks >= 1, "collx: blocks: got ", o.blocks, "; accepted: 1 or more");
}

void check_room(uint64_t needed, uint64_t least, int world_size, uint64_t payload_bytes,
                const char* device) {
  TORCH_CHECK_VALUE(needed <= payload_bytes, "collx: payload_bytes: got ", payload_bytes,
                    "; accepted for ", world_size, " ranks on ", device, ": ", least, " or more");
}

}  // namespace

void check_device(c10::Device device) {
  TORCH_CHECK_VALUE(device.is_cpu() || device.is_cuda(), "collx: device: got ", device,
                    "; accepted: cpu, cuda");
#if !COLLX_CUDA
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu(), "collx: device: got ", device,
                              "; this build has no CUDA kernels");
#endif
}

void check_world(c10::DeviceType device, int world_size) {
  const int most = device == c10::DeviceType::CPU ? kMaxCpuRanks : kMaxCudaRanks;
  TORCH_CHECK_VALUE(world_size >= 1 && world_size <= most, "collx: world_size: got ", world_size,
                    "; accepted on ", device, ": 1 to ", most);
}

CpuLayout require_cpu_layout(int world_size, uint64_t payload_bytes) {
  const CpuLayout layout = cpu_layout(world_size, payload_bytes);
  check_room(layout.total_bytes, smallest_cpu_region(world_size), world_size, payload_bytes, "cpu");
  return layout;
}

CudaLayout require_cuda_layout(int world_size, uint64_t payload_bytes) {
  const CudaLayout layout = cuda_layout(world_size, payload_bytes);
  const uint64_t least = cuda_layout(world_size, 0).total_bytes;
  check_room(layout.total_bytes, least, world_size, payload_bytes, "cuda");
  return layout;
}

std::shared_ptr<Communicator> Communicator::create(CommunicatorOptions options) {
  check_options(options);
  // Pinned memory is allocated in a context of the current device, and creates one if necessary.
  const OnDevice guard(options.device);
  auto made = std::make_shared<Communicator>(std::move(options));
  registry::enter(made);
  if (made->options().watchdog) watchdog::enter(*made);
  return made;
}

Communicator::Communicator(CommunicatorOptions options)
    : options_(std::move(options)),
      status_(options_.device.is_cuda() && !options_.regions.empty()),
      timeout_ms_(options_.timeout_ms),
      pdl_(options_.capabilities.dependent_launch ? options_.pdl : PdlLevel::off),
      deterministic_(options_.deterministic),
      fork_generation_(registry::fork_generation()) {
  for (size_t i = 0; i < options_.regions.size(); ++i) {
    view_.region[i] = reinterpret_cast<char*>(options_.regions[i]);
  }
  if (has_regions() && on_cuda()) {
    cuda_layout_ = require_cuda_layout(options_.world_size, options_.payload_bytes);
  } else if (has_regions()) {
    cpu_layout_ = require_cpu_layout(options_.world_size, options_.payload_bytes);
  }
  view_.status = status_.get();
  view_.rank = options_.rank;
  view_.world = options_.world_size;
  view_.check = options_.check;
  options_.capabilities.multicast = options_.multicast_unavailable_reason.empty();
}

// The status block is not returned here: a kernel may still be in flight.
Communicator::~Communicator() {
  registry::leave(*this);
  if (options_.watchdog) watchdog::leave(*this);
  // The poster's destructor joins its thread, which does not exist in a forked child.
  if (!forked()) delete poster_.load(std::memory_order_acquire);
#if COLLX_CUDA
  end_on(options_.device, [this] {
    streams_.reset();
    copy_streams_.reset();
  });
#endif
}

Poster& Communicator::poster() {
  if (Poster* const made = poster_.load(std::memory_order_acquire)) return *made;
  const auto held = lock();
  if (poster_.load(std::memory_order_relaxed) == nullptr) {
#if COLLX_CUDA
    auto poster = on_cuda() ? make_cuda_poster(options_.device) : make_cpu_poster();
#else
    auto poster = make_cpu_poster();
#endif
    poster_.store(poster.release(), std::memory_order_release);
  }
  return *poster_.load(std::memory_order_relaxed);
}

bool Communicator::forked() const { return fork_generation_ != registry::fork_generation(); }

CudaView Communicator::cuda_view() const {
  CudaView view{view_, cuda_layout_, reinterpret_cast<char*>(options_.multicast),
                options_.simulated};
  view.timeout_ns = timeout_ns();
  view.pdl = pdl();
  // With "early", dependent kernels occupy the device while a grid still spins. Two communicators
  // on two streams could then block each other across ranks.
  if (view.pdl == PdlLevel::early && registry::live_on_device(options_.device.index()) > 1) {
    view.pdl = PdlLevel::end;
  }
  return view;
}

void Communicator::tune(int blocks, int threads) {
  const bool none = blocks == 0 && threads == 0;
  const bool whole_tiles = threads >= 64 && threads <= kFullBlock && threads % 64 == 0;
  TORCH_CHECK_VALUE(none || (blocks >= 1 && blocks <= kMaxBlocks && whole_tiles),
                    "collx.tune: got ", blocks, " blocks of ", threads, " threads; accepted: 1 to ",
                    kMaxBlocks, " of a multiple of 64 up to ", kFullBlock, ", or zeros");
  refuse_if_forked("tune");
  const int most = none ? 0 : most_blocks(threads);
  TORCH_CHECK_VALUE(blocks <= most, "collx.tune: got ", blocks, " blocks of ", threads,
                    " threads; accepted: 1 to ", most, ", which ", options_.device,
                    " can run at once (blocks wait for each other)");
  const auto held = lock();
  tuned_blocks_ = blocks;
  tuned_threads_ = threads;
}

int Communicator::most_blocks(int threads) const {
#if COLLX_CUDA
  if (on_cuda()) {
    const OnDevice guard(options_.device);
    return std::min(kMaxBlocks,
                    cuda::resident_blocks(options_.world_size, options_.simulated, threads));
  }
#endif
  (void)threads;
  return kMaxBlocks;
}

void Communicator::set_timeout(int64_t milliseconds) {
  TORCH_CHECK_VALUE(milliseconds > 0, "collx: timeout: got ", milliseconds,
                    " ms; accepted: 1 or more");
  refuse_if_forked("set_timeout");
  {
    const auto held = lock();
    timeout_ms_.store(milliseconds, std::memory_order_relaxed);
  }
  if (options_.watchdog) watchdog::timeout_changed(*this);
}

int Communicator::spare_blocks() const {
  return registry::live_on_device(options_.device.index()) == 1 ? options_.spare_blocks : 0;
}

Plan Communicator::tuned(Plan plan) const {
  if (tuned_blocks_ == 0 || !has_kernels(plan.algorithm) || !on_cuda()) return plan;
  if (row_of(plan.algorithm).lanes) {
    plan.blocks = std::min(plan.blocks, tuned_blocks_);  // one block of fixed size for each lane
    return plan;
  }
  plan.blocks = tuned_blocks_;
  plan.threads = tuned_threads_;
  return plan;
}

std::optional<StatusRecord> Communicator::failure() const {
  if (status_given_back_.load(std::memory_order_acquire) || !status_.ready()) return std::nullopt;
  return followed_.load(std::memory_order_acquire) ? verdict_ : *recorded(*status_.get());
}

std::string Communicator::describe_failure(const StatusRecord& record) const {
  return describe(record,
                  {options_.name, options_.rank, std::chrono::duration<double>(timeout()).count()});
}

void Communicator::adopt_reported() {
  const auto held = keep_regions();  // another thread may destroy the communicator
  if (!has_regions() || status_.ready() || destroyed() || forked()) return;
  if (!on_cuda()) {
    const CpuView view = cpu_view();
    if (cpu::poisoned(view)) cpu::adopt(view);
    return;
  }
#if COLLX_CUDA
  // The watchdog's thread has a different current device, which the process may not have
  // initialized.
  const OnDevice guard(options_.device);
  if (!capturing(options_.device)) cuda::adopt_reported(cuda_view());
#endif
}

// A kernel can only record its own wait. On the CPU the record already names the missing rank.
std::optional<StatusRecord> Communicator::follow_blame([[maybe_unused]] bool wait) {
  const std::optional<StatusRecord> record = failure();
#if COLLX_CUDA
  if (!record || record->failure != Failure::timeout || !on_cuda() || !has_regions()) return record;
  if (destroyed() || forked() || capturing(options_.device)) return record;
  const OnDevice guard(options_.device);  // as in adopt_reported()
  std::unique_lock held(verdict_mutex_, std::defer_lock);
  if (wait) {
    held.lock();
  } else if (!held.try_lock()) {
    return record;  // another thread is waiting for the notes
  }
  if (followed_.load(std::memory_order_relaxed)) return verdict_;
  const auto kept = keep_regions();
  if (destroyed()) return record;  // in the meantime
  const Verdict verdict = cuda::end_of_chain(cuda_view(), wait);
  if (!verdict.final) return verdict.record;
  verdict_ = verdict.record;
  followed_.store(true, std::memory_order_release);
  return verdict_;
#else
  return record;
#endif
}

void Communicator::check(const char* op, const std::string& detail, bool wait) {
  adopt_reported();
  const std::optional<StatusRecord> record = follow_blame(wait);
  if (!record) return refuse_if_destroyed(op);
  failure_raised_.store(true, std::memory_order_relaxed);
  raise_error({kind_of(record->failure),
               "collx." + std::string(op) + ": " + describe_failure(*record) + detail,
               options_.name, record});
}

void Communicator::refuse_if_destroyed(const char* op) const {
  if (!destroyed()) return;
  raise_error(
      {ErrorKind::poisoned,
       "collx." + std::string(op) + ": communicator \"" + options_.name + "\" has been destroyed",
       options_.name,
       {}});
}

void Communicator::refuse_if_forked(const char* op) const {
  TORCH_CHECK(
      !forked(), "collx.", op, ": communicator \"", options_.name,
      "\" was created before this process was forked, and only the parent can use it; start "
      "processes with the spawn method, and call collx.init in each");
}

void Communicator::require_usable(const char* op) {
  refuse_if_forked(op);
  refuse_if_destroyed(op);
  if (!status_.ready()) [[likely]]
    return;
  if (!failure_raised_.load(std::memory_order_relaxed)) check(op);
  const std::optional<StatusRecord> first = follow_blame(/*wait=*/true);
  raise_error(
      {ErrorKind::poisoned,
       "collx." + std::string(op) + ": communicator \"" + options_.name +
           "\" is poisoned and accepts no calls; first failure: " + describe_failure(*first),
       options_.name, first});
}

void Communicator::raise_refused(const char* op) {
  require_usable(op);
  // Another thread of this process is still about to record the failure.
  raise_error({ErrorKind::poisoned,
               "collx." + std::string(op) + ": communicator \"" + options_.name +
                   "\" is poisoned and accepts no calls; the first failure is not recorded yet",
               options_.name,
               {}});
}

Progress Communicator::progress_of(int rank) const {
  const OnDevice guard(options_.device);
#if COLLX_CUDA
  if (on_cuda()) return cuda::progress_of(cuda_view(), rank);
#endif
  return cpu::progress_of(cpu_view(), rank);
}

std::unique_lock<std::mutex> Communicator::keep_regions() {
  std::unique_lock held(reporting_, std::defer_lock);
  // In a forked child nothing is released, and a thread that it lacks may hold the lock.
  if (!forked()) held.lock();
  return held;
}

std::vector<Progress> Communicator::progress() {
  std::vector<Progress> of;
  const auto held = keep_regions();
  if (!has_regions() || destroyed()) return of;
  for (int rank = 0; rank < options_.world_size; ++rank) of.push_back(progress_of(rank));
  return of;
}

bool Communicator::has_captured() const {
#if COLLX_CUDA
  return streams_->has_captured();
#else
  return false;
#endif
}

bool Communicator::samples_waits() const { return on_cuda() && has_regions() && options_.watchdog; }

void Communicator::add_wait(uint32_t ranks, std::chrono::nanoseconds time) {
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    __atomic_fetch_add(&status_.get()->waited_ns[rank], static_cast<uint64_t>(time.count()),
                       __ATOMIC_RELAXED);
  }
}

std::vector<uint64_t> Communicator::waited() {
  std::vector<uint64_t> of;
  const auto held = keep_regions();
  if (!has_regions() || destroyed() || (on_cuda() && !samples_waits())) return of;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    of.push_back(__atomic_load_n(&status_.get()->waited_ns[rank], __ATOMIC_RELAXED));
  }
  return of;
}

StatusRecord Communicator::begin_record(Failure failure, Phase phase) const {
  StatusRecord record;
  record.failure = failure;
  record.phase = phase;
  record.rank = options_.rank;
  record.sequence = calls();
  return record;
}

void Communicator::report(const StatusRecord& record) {
  // The regions are the parent's, and a thread that the child lacks may hold the lock.
  if (forked()) return;
  const std::lock_guard held(reporting_);
  if (destroyed()) return;  // the regions are gone, or will be
  if (!has_regions()) {
    record_first(*status_.get(), record);
  } else if (!on_cuda()) {
    cpu::report(cpu_view(), record);
  } else {
#if COLLX_CUDA
    const OnDevice guard(options_.device);
    cuda::report(cuda_view(), record);
#endif
  }
}

void Communicator::abort() {
  StatusRecord record = begin_record(Failure::aborted, Phase::none);
  record.peer = options_.rank;
  report(record);
}

void Communicator::abort_posted() {
  Poster* const poster = poster_.load(std::memory_order_acquire);
  if (poster != nullptr && poster->has_pending()) abort();
}

void Communicator::destroy() {
  if (!forked()) let_posted_calls_pass();  // peers may already be in these calls
  if (destroyed_.exchange(true, std::memory_order_acq_rel)) return;
  registry::leave(*this);
  if (options_.watchdog) watchdog::leave(*this);
  if (forked()) return;  // a thread that does not exist in this process may hold the lock
  if (Poster* const poster = poster_.load(std::memory_order_acquire)) poster->close();
  const auto held = lock();
  const std::lock_guard reported(reporting_);
  symmetric_.clear();
  options_.fallback_group.reset();
  // A healthy communicator is destroyed collectively, with nothing in flight. After a failure, a
  // kernel may still write its record.
  if (!status_.ready()) {
    status_given_back_.store(true, std::memory_order_release);
    status_.give_back();
  }
}

}  // namespace collx
