#include "symmetric_pool.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "../memory/interpreter_lock.h"
#include "communicator.h"
#include "enqueue.h"
#include "errors.h"
#include "registry.h"
#if COLLX_CUDA
#include <ATen/ops/record_stream.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>
#endif

namespace collx {

namespace {

constexpr const char* kOp = "allocate_tensor";

#if COLLX_CUDA
/// PyTorch's own kernel ignores memory that its caching allocator did not allocate.
void record_stream(c10::DispatchKeySet keys, at::Tensor& self, at::Stream stream) {
  if (self.has_storage()) note_use(self.storage().data_ptr(), stream);
  const c10::DispatchKeySet behind(c10::DispatchKeySet::FULL_AFTER,
                                   c10::DispatchKey::BackendSelect);
  at::_ops::record_stream::redispatch(keys & behind, self, stream);
}

/// Called when the first pool is used. No other kernel of this operator has that dispatch key.
void follow_record_stream() {
  static const auto* const library = [] {
    auto* const made = new torch::Library(torch::Library::IMPL, "aten",
                                          c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    made->impl("record_stream", record_stream);
    return made;
  }();
  (void)library;
}
#endif

}  // namespace

/// The context of the memory of a tensor from the pool.
struct SymmetricPool::Use {
  std::weak_ptr<SymmetricPool> pool;
  at::Tensor segment;
  uint32_t block;
  std::set<c10::StreamId> streams;  // besides the block's own
};

SymmetricPool::SymmetricPool(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)), fork_generation_(registry::fork_generation()) {}

SymmetricPool::~SymmetricPool() {
#if COLLX_CUDA
  if (recorded_.empty()) return;
  end_on(communicator_->options().device, [this] {
    for (const auto& [block, events] : recorded_) {
      for (void* const event : events) (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
    }
  });
#endif
}

bool SymmetricPool::is_open(Source& source) {
  if (opened_) return pool_.has_value();
  auto words = source.words(sizeof(cpu::PoolPage));
  opened_ = true;
  if (!words) return false;
  words_ = std::move(words->own);
  std::vector<cpu::PoolPage*> pages;
  for (const uint64_t page : words->mapped) pages.push_back(reinterpret_cast<cpu::PoolPage*>(page));
#if COLLX_CUDA
  if (communicator_->on_cuda()) follow_record_stream();
#endif
  pool_.emplace(std::move(pages), communicator_->options().rank, words->most_bytes);
  return true;
}

uint32_t SymmetricPool::stream_number() {
  const c10::StreamId stream = current_stream(communicator_->options().device).id();
  return streams_.try_emplace(stream, static_cast<uint32_t>(streams_.size())).first->second;
}

void SymmetricPool::wait_for(int peer) {
  using Clock = std::chrono::steady_clock;
  constexpr int kYields = 200;
  constexpr std::chrono::microseconds kPause{50};
  const auto until = Clock::now() + communicator_->timeout();
  constexpr std::chrono::milliseconds kBetweenChecks{20};
  auto next_check = Clock::now() + kBetweenChecks;
  for (int i = 0; !pool_->may_decide(peer); ++i) {
    i < kYields ? std::this_thread::yield() : std::this_thread::sleep_for(kPause);
    const auto now = Clock::now();
    if (now >= until) fail(Failure::timeout, peer);
    if (now >= next_check) {
      communicator_->check(kOp);
      next_check = now + kBetweenChecks;
    }
  }
}

void SymmetricPool::fail(Failure failure, int peer) {
  StatusRecord record = communicator_->begin_record(failure, Phase::allocation);
  record.peer = peer;
  communicator_->report(record);
  communicator_->check(kOp);
  TORCH_INTERNAL_ASSERT(false, "the failure has been recorded");
}

at::Tensor SymmetricPool::allocate(int64_t numel, const at::TensorOptions& options,
                                   Source& source) {
  // The source takes Python's lock. Another thread may hold that lock while it waits for this
  // allocation.
  const memory::WithoutInterpreterLock unlocked;
  const std::lock_guard held(allocating_);
  const CommunicatorOptions& o = communicator_->options();
  const OnDevice guard(o.device);
#if COLLX_CUDA
  if (o.device.is_cuda() && capturing(o.device)) return {};
#endif
  communicator_->require_usable(kOp);
  const uint64_t itemsize = options.dtype().itemsize();
  if (static_cast<uint64_t>(numel) > (uint64_t{1} << kAllocationShift) / itemsize) return {};
  if (!is_open(source)) return {};
  pool_->begin(static_cast<uint64_t>(numel) * itemsize, stream_number());
  for (int peer = 0; peer < o.world_size; ++peer) {
    if (!pool_->may_decide(peer)) wait_for(peer);
    if (!pool_->agrees(peer)) fail(Failure::mismatch, peer);
  }
  auto place = pool_->place();
  if (const uint64_t wanted = place ? 0 : pool_->wanted_segment(); wanted != 0) {
    if (at::Tensor segment = source.segment(wanted); segment.defined()) {
      segments_.push_back(std::move(segment));
      pool_->add_segment(wanted);
      place = pool_->place();
    } else {
      pool_->stop_growing();
    }
  }
  if (!place) return {};
  if (place->used_before) order_after_recorded(place->block);
  const at::Tensor& segment = segments_[place->segment];
  auto use = std::make_unique<Use>(Use{weak_from_this(), segment, place->block, {}});
  char* const memory = static_cast<char*>(segment.mutable_data_ptr()) + place->offset;
  return at::for_blob(memory, numel)
      .context(use.release(), &end_use)
      .options(options.device(o.device))
      .target_device(o.device)
      .make_tensor();
}

void SymmetricPool::end_use(void* use) {
  const std::unique_ptr<Use> ended(static_cast<Use*>(use));
  const auto pool = ended->pool.lock();
  // A forked child writes to the parent's memory.
  if (pool == nullptr || pool->fork_generation_ != registry::fork_generation()) return;
  if (pool->record(*ended)) pool->pool_->give_back(ended->block);
}

/// Records the events after which the block's next use is ordered. Returns false if they cannot be
/// recorded; the block must then not be reused.
bool SymmetricPool::record([[maybe_unused]] const Use& use) {
#if COLLX_CUDA
  const std::lock_guard held(mutex_);
  if (use.streams.empty()) return true;
  const c10::Device device = communicator_->options().device;
  try {
    const OnDevice guard(device);
    for (const c10::StreamId id : use.streams) {
      const c10::cuda::CUDAStream stream(c10::Stream(c10::Stream::UNSAFE, device, id));
      if (capturing(stream.stream())) return false;
      cudaEvent_t event = nullptr;
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      recorded_[use.block].push_back(event);
      C10_CUDA_CHECK(cudaEventRecord(event, stream.stream()));
    }
  } catch (const std::exception&) {
    return false;  // the device has failed, or the process is exiting
  }
#endif
  return true;
}

void SymmetricPool::order_after_recorded([[maybe_unused]] uint32_t block) {
#if COLLX_CUDA
  const std::lock_guard held(mutex_);
  const auto found = recorded_.find(block);
  if (found == recorded_.end()) return;
  const auto stream = c10::cuda::getCurrentCUDAStream(communicator_->options().device.index());
  for (void* const event : found->second) {
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), static_cast<cudaEvent_t>(event), 0));
    C10_CUDA_CHECK(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
  }
  recorded_.erase(found);
#endif
}

bool note_use(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get_deleter() != &SymmetricPool::end_use) return false;
  auto* const use = static_cast<SymmetricPool::Use*>(memory.get_context());
  if (const auto pool = use->pool.lock()) {
    const std::lock_guard held(pool->mutex_);
    use->streams.insert(stream.id());
  }
  return true;
}

}  // namespace collx
