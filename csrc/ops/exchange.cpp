#include "exchange.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "../cpu/exchange.h"
#include "../protocol/names.h"
#include "epilogue_kernels.h"
#include "run.h"
#if COLLX_CUDA
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

void describe(const Exchange& e, const at::Tensor& input, CallDescriptor& d) {
  d.collective = e.collective;
  d.dtype = e.dtype;
  d.reduce_op = e.reduce_op;
  d.root = static_cast<int16_t>(e.root);
  d.axis = static_cast<int8_t>(e.axis);
  d.max_blocks = e.max_blocks;
  if (e.epilogue != nullptr) d.epilogue = e.epilogue->known.hash;
  describe_tensor(input, d);
  // What the ranks agree on: of the axis along which their parts may differ, the whole.
  const uint64_t element = input.element_size();
  if (e.collective == Collective::alltoallv) {
    d.sizes[0] = 0;
    d.numel = e.geometry.inner / element;
  } else if (e.collective == Collective::allgather) {
    if (static_cast<size_t>(e.axis) < std::size(d.sizes)) {
      d.sizes[e.axis] = static_cast<int64_t>(e.geometry.units);
    }
    d.numel = e.geometry.bytes() / element;
  }
}

class ExchangeRun {
 public:
  ExchangeCall call{};

  ExchangeRun(const Exchange& e, Communicator& communicator, const at::Tensor& input,
              const at::Tensor& output)
      : e_(e), communicator_(communicator), input_(input), output_(output) {
    const CommunicatorOptions& o = communicator.options();
    call.input = input.const_data_ptr();
    call.output = output.mutable_data_ptr();
    call.collective = e.collective;
    call.geometry = e.geometry;
    call.world = o.world_size;
    call.root = e.root;
    call.element_bytes = static_cast<uint32_t>(input.element_size());
    call.dtype = e.dtype;
    call.reduce_op = e.reduce_op;
    call.splits = e.splits;
    epilogue_.use(communicator, e.algorithm, op(), e.epilogue, output, call);
    if (counted()) {
      bytes_ = count_bytes(e, o.rank, call) * static_cast<uint64_t>(o.world_size);
    } else {
      call.longest = longest_message(e.collective, e.geometry, o.world_size);
      bytes_ = e.geometry.bytes();
    }
    if (e.collective == Collective::gather && o.rank != e.root) call.cleared = output.nbytes();
  }

  const char* op() const { return e_.op(); }
  Algorithm asked() const { return e_.algorithm; }
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

  Places find(SymmetricMemory& memory) const {
    return {memory.find(call.input, input_.nbytes()), memory.find(call.output, output_.nbytes())};
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
    describe(e_, input_, call.descriptor);
  }

  void fall_back() const { fallback_exchange(communicator_, op(), call, input_, output_); }
  bool run(const CpuView& view) const { return cpu::exchange(view, call); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const { cuda::exchange(view, call, stream); }
#endif

 private:
  Request request(const Places& places) const {
    Request request = request_of(communicator_, e_.collective, e_.max_blocks);
    request.dtype = e_.dtype;
    request.reduce_op = e_.reduce_op;
    request.bytes = bytes_;
    request.message = call.longest;
    place_in(request, places.input, places.output);
    request.in_place = in_place();
    request.algorithm = asked();
    return request;
  }
  bool counted() const { return row_of(e_.collective).counted; }
  bool device_splits() const { return e_.splits.sent != nullptr; }
  bool in_place() const { return call.input == call.output; }

  const Exchange& e_;
  Communicator& communicator_;
  const at::Tensor& input_;
  const at::Tensor& output_;
  KernelEpilogue epilogue_;
  uint64_t bytes_ = 0;  // of the full tensor
};

}  // namespace

const char* Exchange::op() const { return name_of(collective).data(); }

void run(const Exchange& e, Communicator& communicator, const at::Tensor& input,
         const at::Tensor& output) {
  ExchangeRun exchange(e, communicator, input, output);
  run(exchange, communicator);
}

}  // namespace collx
