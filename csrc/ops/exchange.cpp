#include "exchange.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "../cpu/calls.h"
#include "../protocol/names.h"
#include "checks.h"
#include "enqueue.h"
#include "epilogue_kernels.h"
#include "fallback.h"
#if COLLX_CUDA
#include "../cuda/calls.h"
#endif

namespace collx {

namespace {

/// Sets the bytes to and from each rank. Returns the longest message to or from another rank.
uint64_t count_bytes(const Exchange& e, int own, ExchangeCall& call) {
  uint64_t longest = 0;
  for (size_t rank = 0; rank < e.sent_rows.size(); ++rank) {
    call.sends[rank] = static_cast<uint64_t>(e.sent_rows[rank]) * e.geometry.inner;
    call.expects[rank] = static_cast<uint64_t>(e.received_rows[rank]) * e.geometry.inner;
    const uint64_t bytes = std::max(call.sends[rank], call.expects[rank]);
    call.longest = std::max(call.longest, bytes);
    if (rank != static_cast<size_t>(own)) longest = std::max(longest, bytes);
  }
  return longest;
}

/// The base of the requests of all collectives. C: AllreduceCall or ExchangeCall.
template <typename C>
class TensorRequest : public CallRequest {
 public:
  Places locate(Communicator& communicator) const override {
    const Places places = find(communicator.symmetric());
    if (asked() != Algorithm::automatic) {
      check_requirements(op(), request(communicator, places), communicator);
    }
    return places;
  }

  uint64_t input_bytes() const override { return input_->nbytes(); }

  void own() override {
    for (Held* held : {&input_, &output_}) *held = Held::owned(at::Tensor(**held));
  }

  void finish() const override {
    const MoreOperands& more = *more_;
    if (more.mapped.defined()) {
      const Epilogue& epilogue = *more.epilogue;
      apply(epilogue.expression(), *output_, epilogue.extras, epilogue.origin, more.mapped);
    }
    for (const auto& [from, to] : more.copies) to.copy_(from);
  }

 protected:
  TensorRequest(const Communicator& communicator, const Exchange& e, const at::Tensor& input,
                const at::Tensor& output, std::shared_ptr<const MoreOperands>&& more)
      : CallRequest(e.op(), e.algorithm),
        input_(Held::borrowed(input)),
        output_(Held::borrowed(output)),
        more_(std::move(more)),
        axis_(e.axis) {
    static_cast<CallCore&>(call_) = e;
    call_.input = input_->const_data_ptr();
    call_.output = output_->mutable_data_ptr();
    kernel_epilogue_.use(communicator, e.algorithm, op(), epilogue(), *output_, call_);
    // A call that only prepares its kernel has no results to copy.
    const bool prepares = call_.epilogue != nullptr && getting_ready();
    has_rest_ = more_ != nullptr && !prepares;
  }

  bool in_place() const { return call_.input == call_.output; }
  const Epilogue* epilogue() const { return more_ ? more_->epilogue.get() : nullptr; }

  Request request(const Communicator& communicator, const Places& places) const {
    Request request = request_of(communicator, call_);
    request.bytes = bytes_;
    request.message = message_;
    place_in(request, places.input, places.output);
    request.in_place = in_place();
    request.epilogue = call_.epilogue != nullptr;
    return request;
  }

  void describe(CallDescriptor& d) const {
    describe_call(call_, d);
    d.axis = static_cast<int8_t>(axis_);
    if (epilogue() != nullptr) d.epilogue = epilogue()->known->hash;
    describe_tensor(*input_, d);
  }

  C call_{};
  using Held = c10::MaybeOwned<at::Tensor>;
  Held input_;
  Held output_;
  const std::shared_ptr<const MoreOperands> more_;
  uint64_t bytes_ = 0;    // of the full tensor
  uint64_t message_ = 0;  // Request::message

 private:
  Places find(SymmetricMemory& memory) const {
    if (memory.is_empty()) return {};
    const auto from = memory.find(call_.input, input_->nbytes());
    if (input_->is_same(*output_)) return {from, from};
    if (call_.output != nullptr) return {from, memory.find(call_.output, output_->nbytes())};
    // Other ranks may have outputs that are not empty, at the place where this one begins.
    const auto* const begin = static_cast<const char*>(output_->storage().data());
    const int64_t offset = output_->storage_offset() * output_->element_size();
    return {from, begin == nullptr ? std::nullopt : memory.find(begin + offset, 1)};
  }

  const int axis_;
  KernelEpilogue kernel_epilogue_;
};

class AllreduceCallRequest final : public TensorRequest<AllreduceCall> {
 public:
  AllreduceCallRequest(const Communicator& communicator, const Exchange& e, const at::Tensor& input,
                       const at::Tensor& output, std::shared_ptr<const MoreOperands>&& more)
      : TensorRequest(communicator, e, input, output, std::move(more)) {
    call_.numel = static_cast<uint64_t>(input_->numel());
    bytes_ = call_.numel * static_cast<uint64_t>(dtype_size(call_.dtype));
    is_empty_ = call_.numel == 0;
  }

  void run_alone(const Launch&) override {
    if (!in_place()) output_->copy_(*input_);
  }

  Call& plan(const Launch& launch, const Places& places) override {
    call_.plan = plan_call(launch.communicator, request(launch.communicator, places));
    describe(call_.descriptor);
    map_peers(launch.communicator, places.input, places.output, call_);
    return call_;
  }

  void run_through_group(const Launch& launch) const override {
    fallback_allreduce(launch.communicator, op(), call_, *input_, *output_);
  }
  bool run(const CpuView& view) const override { return cpu::allreduce(view, call_); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const override {
    cuda::allreduce(view, call_, stream);
  }
#endif
};

class ExchangeCallRequest final : public TensorRequest<ExchangeCall> {
 public:
  ExchangeCallRequest(const Communicator& communicator, const Exchange& e, const at::Tensor& input,
                      const at::Tensor& output, std::shared_ptr<const MoreOperands>&& more)
      : TensorRequest(communicator, e, input, output, std::move(more)) {
    const CommunicatorOptions& o = communicator.options();
    call_.geometry = e.geometry;
    call_.world = o.world_size;
    call_.element_bytes = static_cast<uint32_t>(input_->element_size());
    call_.splits = e.splits;
    if (counted()) {
      bytes_ = count_bytes(e, o.rank, call_) * static_cast<uint64_t>(o.world_size);
    } else {
      call_.longest = longest_message(e.collective, e.geometry, o.world_size);
      bytes_ = e.geometry.bytes();
    }
    if (device_splits()) {
      call_.longest = std::max(e.splits.rows, e.splits.capacity) * e.splits.row_bytes;
    }
    message_ = call_.longest;
    if (e.collective == Collective::gather && o.rank != e.root) call_.cleared = output_->nbytes();
    // With splits on the device, the counts are also a result.
    needs_no_peers_ = !device_splits();
    is_empty_ = !device_splits() && (counted() ? e.geometry.inner : call_.longest) == 0;
  }

  /// A single rank sends only to itself.
  void run_alone(const Launch&) override {
    if (in_place()) return;
    // A view takes 8 % of the instructions of a small call.
    const bool same = input_->sizes() == output_->sizes();
    output_->copy_(same ? *input_ : input_->view_as(*output_));
  }

  Call& plan(const Launch& launch, const Places& places) override {
    const Request wanted = request(launch.communicator, places);
    call_.plan = plan_call(launch.communicator, wanted);
    if (device_splits()) call_.splits.lanes = lanes_of(wanted);
    describe(call_.descriptor);
    describe_whole(call_.descriptor);
    // The ranks must agree only on the places of tensors that peers access: the input of an
    // allgather may be a part of its output. Ranks with different counts have different outputs,
    // which peers access only if the call names an algorithm that needs them.
    const Touched peers = touched(call_.collective);
    const bool output = peers.output && (!counted() || needs_symmetric(call_.plan.algorithm));
    map_peers(launch.communicator, peers.input ? places.input : std::nullopt,
              output ? places.output : std::nullopt, call_);
    return call_;
  }

  void run_through_group(const Launch& launch) const override {
    fallback_exchange(launch.communicator, op(), call_, *input_, *output_);
  }
  bool run(const CpuView& view) const override { return cpu::exchange(view, call_); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const override {
    cuda::exchange(view, call_, stream);
  }
  void copy(const CudaView& view, cuda::CopyStreams& streams, cuda::Stream stream) const override {
    cuda::copy(view, call_, streams, stream);
  }
#endif

 private:
  /// Replaces the size of an axis along which parts may differ by that of the whole axis, so that
  /// all ranks have the same descriptor.
  void describe_whole(CallDescriptor& d) const {
    const uint64_t element = input_->element_size();
    if (counted()) {
      d.sizes[0] = 0;
      d.numel = call_.geometry.inner / element;
    } else if (call_.collective == Collective::allgather) {
      if (static_cast<size_t>(d.axis) < std::size(d.sizes)) {
        d.sizes[d.axis] = static_cast<int64_t>(call_.geometry.units);
      }
      d.numel = call_.geometry.bytes() / element;
    }
  }
  bool counted() const { return row_of(call_.collective).counted; }
  bool device_splits() const { return call_.splits.sent != nullptr; }
};

}  // namespace

const char* Exchange::op() const { return name_of(collective).data(); }

void run(const Exchange& e, Communicator& communicator, const at::Tensor& input,
         const at::Tensor& output, std::shared_ptr<const MoreOperands> more) {
  if (e.collective == Collective::allreduce) {
    make_call<AllreduceCallRequest>(communicator, e, input, output, std::move(more));
  } else {
    make_call<ExchangeCallRequest>(communicator, e, input, output, std::move(more));
  }
}

}  // namespace collx
