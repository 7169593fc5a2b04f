#include "exchange.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "../cpu/allreduce.h"
#include "../cpu/exchange.h"
#include "../protocol/names.h"
#include "epilogue_kernels.h"
#include "run.h"
#if COLLX_CUDA
#include "../cuda/allreduce.h"
#include "../cuda/exchange.h"
#endif

namespace collx {

namespace {

/// Returns the longest message between this rank and another one: of two ranks, both know it.
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

/// What runs of all collectives have in common.
class ExchangeBase {
 public:
  const char* op() const { return e_.op(); }
  Algorithm asked() const { return e_.algorithm; }
  Places find(SymmetricMemory& memory) const {
    const auto from = memory.find(from_, input_.nbytes());
    if (input_.is_same(output_)) return {from, from};
    return {from, memory.find(to_, output_.nbytes())};
  }

 protected:
  ExchangeBase(const Exchange& e, Communicator& communicator, const at::Tensor& input,
               const at::Tensor& output)
      : e_(e),
        communicator_(communicator),
        input_(input),
        output_(output),
        from_(input.const_data_ptr()),
        to_(output.mutable_data_ptr()) {}

  template <typename C>
  void begin(C& call) {
    static_cast<CallCore&>(call) = e_;
    call.input = from_;
    call.output = to_;
    epilogue_.use(communicator_, e_.algorithm, op(), e_.epilogue, output_, call);
  }
  bool in_place() const { return from_ == to_; }

  Request request(const Places& places, uint64_t bytes) const {
    Request request = request_of(communicator_, e_);
    request.bytes = bytes;
    place_in(request, places.input, places.output);
    request.in_place = in_place();
    return request;
  }

  void describe(CallDescriptor& d) const {
    describe_call(e_, d);
    d.axis = static_cast<int8_t>(e_.axis);
    if (e_.epilogue != nullptr) d.epilogue = e_.epilogue->known.hash;
    describe_tensor(input_, d);
  }

  const Exchange& e_;
  Communicator& communicator_;
  const at::Tensor& input_;
  const at::Tensor& output_;
  const void* const from_;
  void* const to_;
  KernelEpilogue epilogue_;
};

class AllreduceRun : public ExchangeBase {
 public:
  AllreduceCall call{};

  AllreduceRun(const Exchange& e, Communicator& communicator, const at::Tensor& input,
               const at::Tensor& output)
      : ExchangeBase(e, communicator, input, output) {
    begin(call);
    call.numel = static_cast<uint64_t>(input.numel());
  }

  static bool needs_no_peers() { return true; }
  bool is_empty() const { return call.numel == 0; }
  void alone() const {
    if (!in_place()) output_.copy_(input_);
  }

  void check(const Places& places) const {
    if (needs_multicast(asked())) check_multicast(op(), request(places), communicator_);
    if (is_empty()) return;
    check_symmetric(op(), asked(), places.input.has_value(), places.output.has_value());
  }
  static const Places& touched(const Places& places) { return places; }
  void plan(const Places& places) {
    call.plan = communicator_.tuned(select(request(places)));
    describe(call.descriptor);
  }

  void fall_back() const { fallback_allreduce(communicator_, op(), call, input_, output_); }
  bool run(const CpuView& view) const { return cpu::allreduce(view, call); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const { cuda::allreduce(view, call, stream); }
#endif

 private:
  Request request(const Places& places) const {
    Request request =
        ExchangeBase::request(places, call.numel * static_cast<uint64_t>(dtype_size(e_.dtype)));
    request.epilogue = call.epilogue != nullptr;
    return request;
  }
};

class ExchangeRun : public ExchangeBase {
 public:
  ExchangeCall call{};

  ExchangeRun(const Exchange& e, Communicator& communicator, const at::Tensor& input,
              const at::Tensor& output)
      : ExchangeBase(e, communicator, input, output) {
    const CommunicatorOptions& o = communicator.options();
    begin(call);
    call.geometry = e.geometry;
    call.world = o.world_size;
    call.element_bytes = static_cast<uint32_t>(input.element_size());
    call.splits = e.splits;
    if (counted()) {
      bytes_ = count_bytes(e, o.rank, call) * static_cast<uint64_t>(o.world_size);
    } else {
      call.longest = longest_message(e.collective, e.geometry, o.world_size);
      bytes_ = e.geometry.bytes();
    }
    if (e.collective == Collective::gather && o.rank != e.root) call.cleared = output.nbytes();
  }

  /// With splits on the device, the counts are a result, too.
  bool needs_no_peers() const { return !device_splits(); }
  bool is_empty() const {
    if (device_splits()) return false;
    return counted() ? e_.geometry.inner == 0 : call.longest == 0;
  }
  /// All that a rank by itself sends stays here.
  void alone() const {
    if (!in_place()) output_.copy_(input_.view_as(output_));
  }

  void check(const Places& places) const {
    if (needs_multicast(asked())) check_multicast(op(), request(places), communicator_);
    if (call.longest == 0) return;
    check_direct(op(), e_.collective, asked(), places.input.has_value(), places.output.has_value(),
                 in_place());
  }
  /// Only of what peers touch need the places agree: an allgather's input may be a part of its
  /// output.
  Places touched(const Places& places) const {
    const Touched peers = collx::touched(e_.collective);
    return {peers.input ? places.input : std::nullopt, peers.output ? places.output : std::nullopt};
  }

  void plan(const Places& places) {
    if (device_splits()) {
      call.longest = std::max(e_.splits.rows, e_.splits.capacity) * e_.splits.row_bytes;
    }
    const Request wanted = request(places);
    call.plan = communicator_.tuned(select(wanted));
    if (device_splits()) call.splits.lanes = lanes_of(wanted);
    describe(call.descriptor);
    describe_whole(call.descriptor);
  }

  void fall_back() const { fallback_exchange(communicator_, op(), call, input_, output_); }
  bool run(const CpuView& view) const { return cpu::exchange(view, call); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const { cuda::exchange(view, call, stream); }
#endif

 private:
  Request request(const Places& places) const {
    Request request = ExchangeBase::request(places, bytes_);
    request.message = call.longest;
    return request;
  }
  /// What the ranks agree on: of the axis along which their parts may differ, the whole.
  void describe_whole(CallDescriptor& d) const {
    const uint64_t element = input_.element_size();
    if (counted()) {
      d.sizes[0] = 0;
      d.numel = e_.geometry.inner / element;
    } else if (e_.collective == Collective::allgather) {
      if (static_cast<size_t>(e_.axis) < std::size(d.sizes)) {
        d.sizes[e_.axis] = static_cast<int64_t>(e_.geometry.units);
      }
      d.numel = e_.geometry.bytes() / element;
    }
  }
  bool counted() const { return row_of(e_.collective).counted; }
  bool device_splits() const { return e_.splits.sent != nullptr; }

  uint64_t bytes_ = 0;  // of the full tensor
};

template <typename Run>
void run_as(const Exchange& e, Communicator& communicator, const at::Tensor& input,
            const at::Tensor& output) {
  Run exchange(e, communicator, input, output);
  run(exchange, communicator);
}

}  // namespace

const char* Exchange::op() const { return name_of(collective).data(); }

void run(const Exchange& e, Communicator& communicator, const at::Tensor& input,
         const at::Tensor& output) {
  const bool allreduce = e.collective == Collective::allreduce;
  (allreduce ? run_as<AllreduceRun> : run_as<ExchangeRun>)(e, communicator, input, output);
}

}  // namespace collx
