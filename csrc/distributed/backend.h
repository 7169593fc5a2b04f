// The torch.distributed backend "collx".
//
// Collectives for which collx has a kernel run on a communicator. There is one communicator for
// each kind of device, created on first use. All other calls go to the inner group, an ordinary
// process group of the same ranks. A call with async_op is posted; without it, the call runs on the
// current stream.
#pragma once

#include <c10/macros/Export.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../ops/posting.h"
#include "../ops/symmetric_pool.h"
#include "../ops/torch_version.h"
#include "hooks.h"

namespace collx {

class Communicator;

namespace distributed {

class Calls;
class Ending;
class Work;

struct C10_EXPORT BackendOptions final : c10d::Backend::Options {
  BackendOptions() : c10d::Backend::Options("collx") {}

  /// Newer versions of PyTorch pass the copy to a group that is split off.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const {
    return c10::make_intrusive<BackendOptions>(*this);
  }

  std::optional<int64_t> max_blocks;     // none: half of the blocks resident on the device
  std::optional<int64_t> payload_bytes;  // none: 128 MiB on CUDA, 16 MiB on the CPU
  /// Limit for all tensors of allocateTensor(). None: 4 GiB on CUDA, 256 MiB on the CPU.
  std::optional<int64_t> symmetric_bytes;
  bool deterministic = true;
  std::optional<bool> check;  // none: according to COLLX_CHECK
  bool watchdog = false;
  bool overlap = false;
  std::optional<std::string> tuning;  // path of a table; none: according to COLLX_TUNING
};

/// The interface to Python, which creates communicators and inner groups.
class Maker {
 public:
  virtual ~Maker() = default;
  /// The communicator of the group on a device. Collective over the group. Returns null on all
  /// ranks if they cannot access each other's memory, or if there are too many ranks.
  virtual std::shared_ptr<Communicator> make(c10::Device device) = 0;
  /// Sets the timeout of later waits, for existing and future communicators.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// For the pool of the communicator from make(): see SymmetricPool::Source.
  virtual std::optional<SymmetricPool::Source::Words> words(c10::Device device, uint64_t bytes) = 0;
  virtual at::Tensor segment(c10::Device device, uint64_t bytes) = 0;
  /// Frees this rank's part of the communicators, and prevents the creation of others. Does not
  /// wait for the other ranks.
  virtual void leave() = 0;
  /// Creates a backend for some of the ranks.
  virtual c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<BackendOptions>& options) = 0;
};

class C10_EXPORT Backend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using Pending = c10::intrusive_ptr<c10d::Work>;

  Backend(int rank, int size, c10::intrusive_ptr<BackendOptions> options,
          c10::intrusive_ptr<c10d::ProcessGroup> inner, std::unique_ptr<Maker> maker);
  ~Backend() override;

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  Pending allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  Pending allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override;
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& o) override;
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override;
  Pending allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& o) override;
  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& o) override;
  Pending allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& o) override;
  Pending allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& o) override;
  Pending reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& o) override;
  Pending _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& o) override;
  Pending reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override;
  Pending gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& o) override;
  /// Exists in newer versions of PyTorch.
  Pending gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& o);
  Pending scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& o) override;
  Pending alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override;
  Pending alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& o) override;
  Pending barrier(const c10d::BarrierOptions& o) override;
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override;

  Pending send(Tensors& tensors, int to, int tag) override;
  Pending recv(Tensors& tensors, int from, int tag) override;
  Pending recvAnysource(Tensors& tensors, int tag) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  Pending endCoalescing() override;

  const std::string getBackendName() const override { return "collx"; }
  /// Returns a copy, because older versions of PyTorch modify it for a group that is split off.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_->clone();
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // it is 0 on every rank
  uint64_t getSequenceNumberForGroup() override { return calls_.load(); }
  c10d::ErrorType getError() override;
  /// Exists in newer versions of PyTorch. Returns the bytes of this rank's regions under the same
  /// names as the NCCL backend.
  std::unordered_map<std::string, uint64_t> getMemoryStats();

  /// The result is the same for all devices: FSDP2 passes only the index, which the CPU does not
  /// have.
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  /// Allocates in symmetric memory, or in ordinary memory on all ranks.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void eagerConnectSingleDevice(at::Device device) override { serves(device); }

#ifdef C10D_BACKEND_HAS_HOOKS
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    hooks_->failed.add(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override { hooks_->failed.drop(id); }
#endif
#if COLLX_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    hooks_->completed.add(id, [hook = std::move(hook)](uint64_t key) { hook({key, {}}); });
  }
  void unregisterCompletionHook(int64_t id) override { hooks_->completed.drop(id); }
#endif

  /// Makes the calls in progress fail on this rank and on the other ranks, whose errors name this
  /// rank.
  void abort() override;
  void shutdown() override;

 private:
  /// A communicator of the group on one kind of device.
  struct Place {
    std::atomic<bool> settled{false};
    std::shared_ptr<Communicator> communicator;  // null: the inner group serves the device
    std::shared_ptr<SymmetricPool> pool;         // null: no communicator, or after shutdown()
  };
  Place& place(c10::Device device) { return places_[device.is_cuda() ? 1 : 0]; }
  /// Whether a communicator serves the device. Creates it if necessary.
  bool serves(c10::Device device);
  std::shared_ptr<SymmetricPool> pool_on(c10::Device device);
  c10d::Backend& inner(c10::Device device) const;
  /// For calls for which Gloo takes the memory of each tensor as a dense array, without a check: it
  /// would read and write elements that are not the tensor's. Raises ValueError for such tensors.
  c10d::Backend& inner(const char* op, const Tensors& tensors) const;
  /// In a coalesced group of calls, the inner backend starts coalescing at its first call.
  c10d::Backend& grouped(c10::Device device);
  std::vector<std::shared_ptr<Communicator>> communicators() const;

  /// Runs `make`, which makes calls, and returns them as one work object. A profiler shows its
  /// title and inputs. `results` are those of Work::result().
  template <typename F>
  Pending work(c10d::OpType type, const char* title, const Tensors& inputs, bool async,
               const Tensors& results, F make);
  c10::intrusive_ptr<Work> begin(c10d::OpType type, const char* title, const Tensors& inputs);
  /// Runs `make`, which makes the calls. If it raises, the failure hooks run first.
  template <typename F>
  void carry_out(const std::shared_ptr<Communicator>& communicator, F make);
  Pending finish(c10::intrusive_ptr<Work> work, const Calls& calls,
                 const std::shared_ptr<Communicator>& communicator, const Tensors& results,
                 PostedCall::Timeout host_waits = {});
  /// Returns the inner group's work. Within a coalesced group of calls it is also kept until the
  /// group ends.
  Pending kept(c10::Device device, const Pending& pending);

  /// The calls between startCoalescing() and endCoalescing().
  struct Coalesced {
    std::vector<std::shared_ptr<PostedCall>> calls;
    std::vector<Pending> inner;
    Tensors tensors;
    std::shared_ptr<Ending> ending;  // of the last call; null without hooks
    // For the hooks: keys and device of the inner works.
    std::vector<uint64_t> keys;
    std::optional<c10::Device> device;
    c10d::Backend* grouped = nullptr;  // the inner backend that coalesces, once it has a call
  };

  const c10::intrusive_ptr<BackendOptions> options_;
  const c10::intrusive_ptr<c10d::ProcessGroup> inner_;
  const std::unique_ptr<Maker> maker_;
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
  std::atomic<uint64_t> calls_{0};
  std::optional<Coalesced> coalesced_;
  std::string split_name_;  // name of the group that was split off last
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> split_;
  std::mutex mutex_;  // guards changes of places_
  Place places_[2];   // the CPU, CUDA
  std::atomic<bool> left_{false};
};

}  // namespace distributed
}  // namespace collx
