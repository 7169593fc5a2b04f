#include "exchange.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "../cpu/exchange.h"
#include "../protocol/names.h"
#include "call.h"
#include "checks.h"
#include "fallback.h"
#if COLLX_CUDA
#include "../cuda/exchange.h"
#endif

namespace collx {

namespace {

/// Rows `start` to `start + count` of a tensor.
Span row_span(uint64_t start, uint64_t count, uint64_t row_bytes) {
  Span span = dense_span(count * row_bytes);
  span.offset = start * row_bytes;
  return span;
}

void lay_out_splits(const Exchange& e, ExchangeCall& call) {
  const uint64_t row_bytes = e.geometry.inner;
  uint64_t from = 0, to = 0;
  for (size_t rank = 0; rank < e.sent_rows.size(); ++rank) {
    const auto sent = static_cast<uint64_t>(e.sent_rows[rank]);
    const auto received = static_cast<uint64_t>(e.received_rows[rank]);
    call.sent[rank] = row_span(from, sent, row_bytes);
    call.received[rank] = row_span(to, received, row_bytes);
    call.longest = std::max({call.longest, call.sent[rank].bytes(), call.received[rank].bytes()});
    from += sent;
    to += received;
  }
}

void lay_out(const Exchange& e, int world, int rank, ExchangeCall& call) {
  const auto& g = e.geometry;
  for (int r = 0; r < world; ++r) {
    call.sent[r] = sent_span(e.collective, g, world, e.root, rank, r);
    call.received[r] = received_span(e.collective, g, world, e.root, r, rank);
    call.landing[r] = received_span(e.collective, g, world, e.root, rank, r);
    call.taken[r] = sent_span(e.collective, g, world, e.root, r, rank);
  }
  const bool whole = e.collective == Collective::broadcast || e.collective == Collective::reduce;
  call.longest = whole ? g.bytes() : g.part_bytes(world, 0);  // low ranks have the long parts
}

void describe(const Exchange& e, const at::Tensor& input, CallDescriptor& d) {
  d.collective = e.collective;
  d.dtype = e.dtype;
  d.reduce_op = e.reduce_op;
  d.root = static_cast<int16_t>(e.root);
  d.axis = static_cast<int16_t>(e.axis);
  d.max_blocks = e.max_blocks;
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

Plan make_plan(const Exchange& e, const Communicator& communicator, const ExchangeCall& call,
               uint64_t bytes, bool input_symmetric, bool output_symmetric) {
  Request request = request_of(communicator, e.collective, e.max_blocks);
  request.dtype = e.dtype;
  request.bytes = bytes;
  request.message = call.longest;
  // In place peers would overwrite what is still to be sent.
  const bool in_place = e.collective == Collective::alltoall && call.input == call.output;
  request.input_symmetric = input_symmetric;
  request.output_symmetric = output_symmetric && !in_place;
  request.algorithm = e.algorithm;
  return communicator.tuned(select(request));
}

/// How a broadcast of one stage between GPUs is carried out: the descriptor keeps its name.
Algorithm carried_out(const Exchange& e, const Communicator& communicator, Algorithm algorithm,
                      uint64_t bytes, bool output_symmetric) {
  if (algorithm != Algorithm::onestage || !communicator.on_cuda()) return algorithm;
  Request request = request_of(communicator, e.collective, 0);
  request.bytes = bytes;
  request.output_symmetric = output_symmetric;
  return onestage_is_direct(request) ? Algorithm::direct : Algorithm::staged;
}

/// A rank by itself: all that it sends stays here.
void run_alone(const at::Tensor& input, const at::Tensor& output) {
  if (input.const_data_ptr() != output.const_data_ptr()) output.copy_(input.view_as(output));
}

void carry_out(Communicator& communicator, const Exchange& e, const ExchangeCall& call) {
#if COLLX_CUDA
  if (communicator.on_cuda()) {
    cuda::exchange(communicator.view(), call, communicator.streams().enter());
    return;
  }
#endif
  if (!cpu::exchange(communicator.view(), call)) communicator.require_usable(e.op());
}

/// Nothing to exchange between any ranks, which all of them know.
bool empty_everywhere(const Exchange& e, const ExchangeCall& call) {
  if (e.splits.sent != nullptr) return false;  // the counts are a result, too
  return e.collective == Collective::alltoallv ? e.geometry.inner == 0 : call.longest == 0;
}

}  // namespace

const char* Exchange::op() const { return name_of(collective).data(); }

void run(const Exchange& e, Communicator& communicator, const at::Tensor& input,
         const at::Tensor& output) {
  const int world = communicator.options().world_size, rank = communicator.options().rank;
  ExchangeCall call{};
  call.input = input.const_data_ptr();
  call.output = output.mutable_data_ptr();
  call.collective = e.collective;
  call.root = e.root;
  call.element_bytes = static_cast<uint32_t>(input.element_size());
  call.dtype = e.dtype;
  call.reduce_op = e.reduce_op;
  call.splits = e.splits;
  if (e.collective == Collective::alltoallv) {
    lay_out_splits(e, call);
  } else {
    lay_out(e, world, rank, call);
  }
  if (e.collective == Collective::gather && rank != e.root) call.cleared = output.nbytes();
  const bool device_splits = e.splits.sent != nullptr;
  const uint64_t bytes =
      e.collective == Collective::alltoallv ? call.longest * world : e.geometry.bytes();

  const auto held = communicator.lock();
  communicator.require_usable(e.op());
  const auto from = communicator.symmetric().find(call.input, input.nbytes());
  const auto to = communicator.symmetric().find(call.output, output.nbytes());
  if (call.longest > 0) {
    check_direct(e.op(), e.collective, e.algorithm, from.has_value(), to.has_value(),
                 call.input == call.output);
  }
  if (world == 1 && !device_splits) return run_alone(input, output);
  if (world > 1) check_peer_access(e.op(), e.algorithm, communicator);
  if (empty_everywhere(e, call) && !communicator.options().check) return;

  if (device_splits) call.longest = std::max(e.splits.rows, e.splits.capacity) * e.splits.row_bytes;
  call.plan = make_plan(e, communicator, call, bytes, from.has_value(), to.has_value());
  describe(e, input, call.descriptor);
  call.descriptor.algorithm = call.plan.algorithm;
  // Only of what peers touch need the places agree: an allgather's input may be a part of its
  // output.
  const bool reads = is_reduction(e.collective), touched = e.collective != Collective::alltoallv;
  map_peers(communicator, reads && touched ? from : std::nullopt,
            !reads && touched ? to : std::nullopt, call);
  if (call.plan.algorithm == Algorithm::fallback) {
    enter_fallback(communicator, e.op(), call.descriptor);
    fallback_exchange(communicator, e.op(), call, input, output);
  } else {
    call.plan.algorithm = carried_out(e, communicator, call.plan.algorithm, bytes, to.has_value());
    carry_out(communicator, e, call);
  }
  communicator.count_call();
}

}  // namespace collx
