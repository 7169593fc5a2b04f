#include "backend.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <array>
#include <utility>

#include "../ops/communicator.h"
#include "calls.h"
#include "ending.h"
#include "work.h"

namespace collx::distributed {

namespace {

using c10d::OpType;
using Tensors = Backend::Tensors;
using Pending = Backend::Pending;

/// PyTorch passes lists, because a process could once have several devices.
template <typename T>
T& only(const char* op, std::vector<T>& list) {
  TORCH_CHECK_VALUE(list.size() == 1, "collx: ", op, ": got ", list.size(),
                    " tensors of this rank; accepted: one");
  return list[0];
}

/// Gloo cuts tensors along their first axis, so it would crash for an output without dimensions and
/// refuse stacked parts. NCCL accepts any shapes.
at::Tensor for_gloo(const char* op, const char* argument, const at::Tensor& tensor) {
  return tensor.is_cpu() ? flat(op, argument, tensor) : tensor;
}

class FromMaker final : public SymmetricPool::Source {
 public:
  FromMaker(Maker& maker, c10::Device device) : maker_(maker), device_(device) {}
  std::optional<Words> words(uint64_t bytes) override { return maker_.words(device_, bytes); }
  at::Tensor segment(uint64_t bytes) override { return maker_.segment(device_, bytes); }

 private:
  Maker& maker_;
  const c10::Device device_;
};

}  // namespace

Backend::Backend(int rank, int size, c10::intrusive_ptr<BackendOptions> options,
                 c10::intrusive_ptr<c10d::ProcessGroup> inner, std::unique_ptr<Maker> maker)
    : c10d::Backend(rank, size),
      options_(std::move(options)),
      inner_(std::move(inner)),
      maker_(std::move(maker)) {}

Backend::~Backend() = default;

// --- communicators, and the inner group -------------------------------------------------------

bool Backend::serves(c10::Device device) {
  TORCH_CHECK_VALUE(!left_.load(std::memory_order_relaxed), "collx: process group \"",
                    options_->group_name, "\" has been shut down");
  if (!device.is_cpu() && !device.is_cuda()) return false;
  Place& at = place(device);
  if (at.settled.load(std::memory_order_acquire)) return at.communicator != nullptr;
  // Called without the mutex, since it takes Python's lock. Python creates one for all threads.
  std::shared_ptr<Communicator> made = maker_->make(device);
  const std::lock_guard held(mutex_);
  if (!at.settled.load(std::memory_order_relaxed)) {
    if (made != nullptr) at.pool = std::make_shared<SymmetricPool>(made);
    at.communicator = std::move(made);
    at.settled.store(true, std::memory_order_release);
  }
  return at.communicator != nullptr;
}

std::vector<std::shared_ptr<Communicator>> Backend::communicators() const {
  std::vector<std::shared_ptr<Communicator>> made;
  for (const Place& place : places_) {
    if (place.settled.load(std::memory_order_acquire) && place.communicator != nullptr) {
      made.push_back(place.communicator);
    }
  }
  return made;
}

std::shared_ptr<SymmetricPool> Backend::pool_on(c10::Device device) {
  const std::lock_guard held(mutex_);
  return place(device).pool;
}

bool Backend::supportsTensorAlloc(c10::DeviceIndex /*index*/) {
  return size_ > 1 && options_->symmetric_bytes != 0;
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const c10::Device device = options.device();
  TORCH_CHECK_VALUE(size >= 0, "collx: allocate_tensor: size: got ", size, "; accepted: 0 or more");
  const bool served = serves(device);
  if (served && size > 0 && supportsTensorAlloc(device.index())) {
    const c10::Device own = place(device).communicator->options().device;
    TORCH_CHECK_VALUE(!device.has_index() || device == own, "collx: allocate_tensor: device: got ",
                      device, "; accepted: the communicator's, ", own);
    FromMaker source(*maker_, own);
    if (const auto pool = pool_on(device)) {
      at::Tensor made = pool->allocate(size, options, source);
      if (made.defined()) return made;
    }
  }
  return at::empty({size}, options);
}

c10d::Backend& Backend::inner(c10::Device device) const {
  return *inner_->getBackend(device.type());
}

c10d::Backend& Backend::inner(const char* op, const Tensors& tensors) const {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.layout() != at::kStrided || tensor.is_non_overlapping_and_dense(),
                      "collx: ", op, ": got strides ", tensor.strides(), " for shape ",
                      tensor.sizes(), " in a call that the inner process group carries out; ",
                      "accepted: a tensor whose elements fill its memory");
  }
  return inner(tensors[0].device());
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  inner_->setTimeout(timeout);
  maker_->set_timeout(timeout);
}

c10d::ErrorType Backend::getError() {
  for (const auto& one : communicators()) {
    const auto failure = one->failure();
    if (!failure) continue;
    return failure->failure == Failure::timeout ? c10d::ErrorType::TIMEOUT
                                                : c10d::ErrorType::COMM_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  uint64_t total = 0;
  for (const auto& one : communicators()) {
    total += one->on_cuda() ? one->cuda_layout().total_bytes : one->cpu_layout().total_bytes;
  }
  return {{"suspend", 0}, {"suspended", 0}, {"persist", total}, {"total", total}};
}

void Backend::abort() {
  hooks_->failed();
  for (const auto& one : communicators()) one->abort();
  inner_->abort();
}

void Backend::shutdown() {
  if (left_.exchange(true)) return;
  maker_->leave();
  // Destroyed without the mutex, since releasing the memory may take Python's lock.
  std::array<std::shared_ptr<SymmetricPool>, 2> pools;
  {
    const std::lock_guard held(mutex_);
    for (size_t i = 0; i < pools.size(); ++i) pools[i].swap(places_[i].pool);
  }
  inner_->shutdown();
}

c10::intrusive_ptr<c10d::Backend> Backend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  auto* const own = dynamic_cast<BackendOptions*>(options.get());
  TORCH_CHECK_TYPE(own != nullptr,
                   "collx: split_group: pg_options: accepted: collx.backend.Options");
  // PyTorch calls this once for each kind of device, but one backend serves all of them. A second
  // backend would find the inner group of the first in the store.
  if (split_ && split_name_ == own->group_name) {
    auto made = split_->lock();
    if (made != nullptr && !static_cast<Backend&>(*made).left_) return made;
  }
  auto made = maker_->split(store, ranks, c10::intrusive_ptr<BackendOptions>::reclaim_copy(own));
  if (made != nullptr) split_.emplace(made);
  split_name_ = own->group_name;
  return made;
}

// --- work objects -----------------------------------------------------------------------------

c10::intrusive_ptr<Work> Backend::begin(OpType type, const char* title, const Tensors& inputs) {
  const uint64_t number = calls_.fetch_add(1);
  if (!at::hasCallbacks()) return c10::make_intrusive<Work>(rank_, type, number);
  return c10::make_intrusive<Work>(rank_, type, number, title, inputs);
}

Pending Backend::finish(c10::intrusive_ptr<Work> work, const Calls& calls,
                        const std::shared_ptr<Communicator>& communicator, const Tensors& results,
                        PostedCall::Timeout host_waits) {
  std::shared_ptr<Ending> ending;
  if (hooks_->any()) [[unlikely]]
    ending = Ending::report(hooks_, communicator, calls.posted());
  if (coalesced_) {
    Coalesced& all = *coalesced_;
    all.ending = ending;
    all.calls.insert(all.calls.end(), calls.posted().begin(), calls.posted().end());
    all.tensors.insert(all.tensors.end(), calls.tensors().begin(), calls.tensors().end());
  }
  work->set({calls.posted(), {}, results, calls.tensors(), host_waits, std::move(ending)});
  return work;
}

template <typename F>
void Backend::carry_out(const std::shared_ptr<Communicator>& communicator, F make) {
  try {
    make();
  } catch (...) {
    if (hooks_->any()) Ending(hooks_, communicator).before_raising();
    throw;
  }
}

template <typename F>
Pending Backend::work(OpType type, const char* title, const Tensors& inputs, bool async,
                      const Tensors& results, F make) {
  auto begun = begin(type, title, inputs);
  const at::Tensor& one = inputs.empty() ? results.at(0) : inputs[0];
  const std::shared_ptr<Communicator>& communicator = place(one.device()).communicator;
  TORCH_CHECK_VALUE(communicator != nullptr, title, ": input: got a tensor on ", one.device(),
                    "; accepted: the device of the output");
  Calls calls(communicator->options().name, size_, rank_, async);
  carry_out(communicator, [&] { make(calls); });
  if (async) {
    calls.uses(inputs);
    calls.uses(results);
  }
  return finish(std::move(begun), calls, communicator, results);
}

Pending Backend::kept(c10::Device device, const Pending& pending) {
  if (coalesced_) {
    // To query a CUDA work, its device must be the current one.
    if (!coalesced_->device || device.is_cuda()) coalesced_->device = device;
    if (pending == nullptr) return pending;
    // The work of the inner backend's group includes this call.
    if (&inner(device) != coalesced_->grouped) coalesced_->inner.push_back(pending);
    coalesced_->keys.push_back(completion_key(*pending));
  } else if (pending != nullptr && hooks_->any()) [[unlikely]] {
    report_end(hooks_, {pending}, {completion_key(*pending)}, device);
  }
  return pending;
}

void Backend::startCoalescing() { coalesced_.emplace(); }

Pending Backend::endCoalescing() {
  TORCH_CHECK(coalesced_.has_value(), "collx: coalescing ends without a start");
  Coalesced all = *std::exchange(coalesced_, std::nullopt);
  if (all.grouped != nullptr) {
    // Null if no call of the group was made.
    if (auto group = all.grouped->endCoalescing()) all.inner.push_back(std::move(group));
  }
  if (hooks_->any() && !all.inner.empty()) report_end(hooks_, all.inner, all.keys, *all.device);
  auto work = c10::make_intrusive<Work>(rank_, OpType::COALESCED, calls_.load());
  work->set({std::move(all.calls),
             std::move(all.inner),
             {},
             std::move(all.tensors),
             {},
             std::move(all.ending)});
  return work;
}

// --- collectives ------------------------------------------------------------------------------

Pending Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
  const at::Tensor& tensor = only("all_reduce", tensors);
  auto reduction = reduction_of(o.reduceOp, tensor);
  if (!reduction || !serves(tensor.device())) {
    return kept(tensor.device(), inner("all_reduce", tensors).allreduce(tensors, o));
  }
  return work(OpType::ALLREDUCE, "collx:all_reduce", tensors, o.asyncOp, tensors, [&](Calls& c) {
    c([&] { operators::allreduce_(reduction->tensor, reduction->op, c.name); });
  });
}

Pending Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) {
  const c10::Device device = only("all_reduce", tensors).device();
  return kept(device, inner(device).allreduce_sparse(tensors, o));
}

Pending Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
  TORCH_CHECK_VALUE(!tensors.empty(), "collx: all_reduce_coalesced: got no tensor");
  std::vector<Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    auto reduction = reduction_of(o.reduceOp, tensor);
    if (!reduction || !serves(tensor.device())) {
      return kept(tensor.device(),
                  inner("all_reduce_coalesced", tensors).allreduce_coalesced(tensors, o));
    }
    reductions.push_back(*std::move(reduction));
  }
  return work(OpType::ALLREDUCE_COALESCED, "collx:all_reduce_coalesced", tensors, o.asyncOp,
              tensors, [&](Calls& c) {
                for (Reduction& r : reductions) {
                  c([&] { operators::allreduce_(r.tensor, r.op, c.name); });
                }
              });
}

Pending Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  const at::Tensor& tensor = only("reduce", tensors);
  auto reduction = reduction_of(o.reduceOp, tensor);
  if (!reduction || !serves(tensor.device())) {
    return kept(tensor.device(), inner("reduce", tensors).reduce(tensors, o));
  }
  return work(OpType::REDUCE, "collx:reduce", tensors, o.asyncOp, tensors, [&](Calls& c) {
    c([&] { operators::reduce_(reduction->tensor, reduction->op, o.rootRank, c.name); });
  });
}

Pending Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  at::Tensor& tensor = only("broadcast", tensors);
  if (!serves(tensor.device())) {
    return kept(tensor.device(), inner("broadcast", tensors).broadcast(tensors, o));
  }
  return work(OpType::BROADCAST, "collx:broadcast", tensors, o.asyncOp, tensors,
              [&](Calls& c) { c([&] { operators::broadcast_(tensor, o.rootRank, c.name); }); });
}

Pending Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) {
  const at::Tensor& input = only("all_gather", inputs);
  const Tensors& to = only("all_gather", outputs);
  if (!serves(input.device())) {
    return kept(input.device(), inner(input.device()).allgather(outputs, inputs, o));
  }
  return work(OpType::ALLGATHER, "collx:all_gather", inputs, o.asyncOp, to,
              [&](Calls& c) { c.allgather(input, to); });
}

Pending Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& o) {
  if (!serves(input.device())) {
    at::Tensor from = for_gloo("all_gather", "input", input);
    at::Tensor to = for_gloo("all_gather", "output", output);
    return kept(input.device(), inner(input.device())._allgather_base(to, from, o));
  }
  return work(OpType::_ALLGATHER_BASE, "collx:all_gather_into_tensor", {input}, o.asyncOp, {output},
              [&](Calls& c) { c.allgather(input, output); });
}

Pending Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& o) {
  TORCH_CHECK_VALUE(!inputs.empty(), "collx: all_gather_coalesced: got no tensor");
  if (!serves(inputs[0].device())) {
    return kept(inputs[0].device(),
                inner(inputs[0].device()).allgather_coalesced(outputs, inputs, o));
  }
  // There is a list for each rank, with a tensor for each input.
  Tensors results;
  for (const Tensors& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "collx: all_gather_coalesced: got ",
                      list.size(), " outputs of a rank; accepted: one for each of ", inputs.size(),
                      " inputs");
    results.insert(results.end(), list.begin(), list.end());
  }
  return work(OpType::ALLGATHER_COALESCED, "collx:all_gather_coalesced", inputs, o.asyncOp, results,
              [&](Calls& c) {
                for (size_t i = 0; i < inputs.size(); ++i) {
                  Tensors to;
                  for (const Tensors& list : outputs) to.push_back(list[i]);
                  c.allgather(inputs[i], to);
                }
              });
}

Pending Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& o) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(),
                    "collx: all_gather_into_tensor_coalesced: got ", inputs.size(), " inputs and ",
                    outputs.size(), " outputs; accepted: one for each other");
  if (!serves(inputs[0].device())) {
    return kept(inputs[0].device(),
                inner(inputs[0].device()).allgather_into_tensor_coalesced(outputs, inputs, o));
  }
  return work(OpType::COALESCED, "collx:all_gather_into_tensor_coalesced", inputs, o.asyncOp,
              outputs, [&](Calls& c) {
                for (size_t i = 0; i < inputs.size(); ++i) c.allgather(inputs[i], outputs[i]);
              });
}

Pending Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                const c10d::ReduceScatterOptions& o) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& from = only("reduce_scatter", inputs);
  const auto reduction = reduction_of(o.reduceOp, output);
  if (!reduction || !serves(output.device())) {
    Tensors all = outputs;
    all.insert(all.end(), from.begin(), from.end());
    return kept(output.device(), inner("reduce_scatter", all).reduce_scatter(outputs, inputs, o));
  }
  return work(OpType::REDUCE_SCATTER, "collx:reduce_scatter", from, o.asyncOp, outputs,
              [&](Calls& c) { c.reducescatter(from, output, *reduction, o.reduceOp); });
}

Pending Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& o) {
  const auto reduction = reduction_of(o.reduceOp, output);
  if (!reduction || !serves(output.device())) {
    at::Tensor from = for_gloo("reduce_scatter", "input", input);
    at::Tensor to = for_gloo("reduce_scatter", "output", output);
    return kept(output.device(), inner(output.device())._reduce_scatter_base(to, from, o));
  }
  return work(OpType::_REDUCE_SCATTER_BASE, "collx:reduce_scatter_tensor", {input}, o.asyncOp,
              {output}, [&](Calls& c) { c.reducescatter(input, *reduction, o.reduceOp); });
}

Pending Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& o) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(),
                    "collx: reduce_scatter_tensor_coalesced: got ", inputs.size(), " inputs and ",
                    outputs.size(), " outputs; accepted: one for each other");
  std::vector<Reduction> reductions;
  for (const at::Tensor& output : outputs) {
    auto reduction = reduction_of(o.reduceOp, output);
    if (!reduction || !serves(output.device())) {
      return kept(output.device(),
                  inner(output.device()).reduce_scatter_tensor_coalesced(outputs, inputs, o));
    }
    reductions.push_back(*std::move(reduction));
  }
  return work(OpType::COALESCED, "collx:reduce_scatter_tensor_coalesced", inputs, o.asyncOp,
              outputs, [&](Calls& c) {
                for (size_t i = 0; i < inputs.size(); ++i) {
                  c.reducescatter(inputs[i], reductions[i], o.reduceOp);
                }
              });
}

Pending Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& o) {
  const at::Tensor& input = only("gather", inputs);
  if (!serves(input.device())) {
    return kept(input.device(), inner(input.device()).gather(outputs, inputs, o));
  }
  const Tensors to = outputs.empty() ? Tensors{} : outputs[0];
  return work(OpType::GATHER, "collx:gather", inputs, o.asyncOp, to,
              [&](Calls& c) { c.gather(input, to, o.rootRank); });
}

Pending Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                    const c10d::GatherOptions& o) {
  const Tensors results = rank_ == o.rootRank ? Tensors{output} : Tensors{};
  if (!serves(input.device())) {
    TensorLists lists;
    if (!results.empty()) lists.push_back(output.chunk(size_));
    Tensors inputs = {input};
    return kept(input.device(), inner(input.device()).gather(lists, inputs, o));
  }
  return work(OpType::GATHER, "collx:gather_into_tensor", {input}, o.asyncOp, results,
              [&](Calls& c) { c.gather(input, output, o.rootRank); });
}

Pending Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& o) {
  const at::Tensor& output = only("scatter", outputs);
  if (!serves(output.device())) {
    return kept(output.device(), inner(output.device()).scatter(outputs, inputs, o));
  }
  const Tensors from = inputs.empty() ? Tensors{} : inputs[0];
  return work(OpType::SCATTER, "collx:scatter", from, o.asyncOp, outputs,
              [&](Calls& c) { c.scatter(from, output, o.rootRank); });
}

Pending Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) {
  const auto ranks = static_cast<size_t>(size_);
  TORCH_CHECK_VALUE(inputs.size() == ranks && outputs.size() == ranks, "collx: all_to_all: got ",
                    inputs.size(), " inputs and ", outputs.size(),
                    " outputs; accepted: one for each of ", size_, " ranks");
  if (!serves(inputs[0].device())) {
    return kept(inputs[0].device(), inner(inputs[0].device()).alltoall(outputs, inputs, o));
  }
  return work(OpType::ALLTOALL, "collx:all_to_all", inputs, o.asyncOp, outputs,
              [&](Calls& c) { c.alltoall(inputs, outputs); });
}

Pending Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& o) {
  if (!serves(input.device())) {
    return kept(input.device(),
                inner(input.device()).alltoall_base(output, input, output_splits, input_splits, o));
  }
  return work(OpType::ALLTOALL_BASE, "collx:all_to_all_single", {input}, o.asyncOp, {output},
              [&](Calls& c) { c.alltoall(input, output, input_splits, output_splits); });
}

Pending Backend::barrier(const c10d::BarrierOptions& o) {
  // PyTorch does not pass o.device on.
  c10::Device device = getBoundDeviceId().value_or(c10::kCPU);
  if (!o.device_ids.empty() && at::hasCUDA()) {
    device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(o.device_ids[0]));
  }
  const bool on_cuda = device.is_cuda();
  if (!serves(device)) return kept(device, inner(device).barrier(o));
  const std::shared_ptr<Communicator>& communicator = place(device).communicator;
  // On CUDA, wait() blocks the host as in other backends. This requires a posted call.
  auto begun = begin(OpType::BARRIER, "collx:barrier", {});
  Calls calls(communicator->options().name, size_, rank_, o.asyncOp || on_cuda);
  carry_out(communicator, [&] { calls([&] { operators::barrier(calls.name); }); });
  PostedCall::Timeout host_waits;
  if (on_cuda) host_waits = communicator->timeout();
  return finish(std::move(begun), calls, communicator, {}, host_waits);
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) {
  inner(c10::kCPU).monitoredBarrier(o, wait_all_ranks);
}

// --- point to point, through the inner group --------------------------------------------------

c10d::Backend& Backend::grouped(c10::Device device) {
  c10d::Backend& backend = inner(device);
  if (coalesced_ && coalesced_->grouped == nullptr && backend.supportsCoalescing()) {
    backend.startCoalescing();
    coalesced_->grouped = &backend;
  }
  return backend;
}

Pending Backend::send(Tensors& tensors, int to, int tag) {
  const c10::Device device = only("send", tensors).device();
  return kept(device, grouped(device).send(tensors, to, tag));
}

Pending Backend::recv(Tensors& tensors, int from, int tag) {
  const c10::Device device = only("recv", tensors).device();
  return kept(device, grouped(device).recv(tensors, from, tag));
}

Pending Backend::recvAnysource(Tensors& tensors, int tag) {
  const c10::Device device = only("recv", tensors).device();
  return kept(device, inner(device).recvAnysource(tensors, tag));
}

}  // namespace collx::distributed
