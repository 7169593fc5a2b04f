#include "allreduce.h"

#include "../cpu/allreduce.h"
#include "call.h"
#include "checks.h"
#include "fallback.h"
#include "registry.h"
#if COLLX_CUDA
#include "../cuda/allreduce.h"
#endif

namespace collx {

namespace {

constexpr const char* kOp = "allreduce";

Plan make_plan(const Communicator& communicator, const ReductionOptions& options, uint64_t bytes,
               bool input_symmetric, bool output_symmetric) {
  Request request = request_of(communicator, Collective::allreduce, options.max_blocks);
  request.dtype = options.dtype;
  request.bytes = bytes;
  request.input_symmetric = input_symmetric;
  request.output_symmetric = output_symmetric;
  request.algorithm = options.algorithm;
  return communicator.tuned(select(request));
}

void describe_call(const at::Tensor& input, const ReductionOptions& options, AllreduceCall& call) {
  CallDescriptor& d = call.descriptor;
  d.collective = Collective::allreduce;
  d.dtype = options.dtype;
  d.reduce_op = options.reduce_op;
  d.algorithm = call.plan.algorithm;
  d.max_blocks = options.max_blocks;
  describe_tensor(input, d);
}

void run_on_cpu(Communicator& communicator, const RankView& view, const AllreduceCall& call) {
  if (!cpu::allreduce(view, call)) communicator.require_usable(kOp);
}

/// Both tensors are contiguous; they are the same memory or share nothing.
void run(Communicator& communicator, const ReductionOptions& options, const at::Tensor& input,
         const at::Tensor& output) {
  const bool in_place = input.const_data_ptr() == output.const_data_ptr();
  AllreduceCall call{};
  call.input = input.const_data_ptr();
  call.output = output.mutable_data_ptr();
  call.numel = static_cast<uint64_t>(input.numel());
  call.dtype = options.dtype;
  call.reduce_op = options.reduce_op;
  const uint64_t bytes = call.numel * static_cast<uint64_t>(dtype_size(options.dtype));

  const auto held = communicator.lock();
  communicator.require_usable(kOp);
  const auto from = communicator.symmetric().find(call.input, bytes);
  const auto to = in_place ? from : communicator.symmetric().find(call.output, bytes);
  if (call.numel > 0) {
    check_symmetric(kOp, options.algorithm, from.has_value(), to.has_value());
  }
  if (communicator.options().world_size == 1) {
    if (!in_place) output.copy_(input);
    return;
  }
  check_peer_access(kOp, options.algorithm, communicator);
  if (call.numel == 0 && !communicator.options().check) return;

  call.plan = make_plan(communicator, options, bytes, from.has_value(), to.has_value());
  describe_call(input, options, call);
  map_peers(communicator, from, to, call);
  if (call.plan.algorithm == Algorithm::fallback) {
    enter_fallback(communicator, kOp, call.descriptor);
    fallback_allreduce(communicator, kOp, call, input, output);
  } else if (!communicator.on_cuda()) {
    run_on_cpu(communicator, communicator.view(), call);
  } else {
#if COLLX_CUDA
    cuda::allreduce(communicator.view(), call, communicator.streams().enter());
#endif
  }
  communicator.count_call();
}

struct Prepared {
  ReductionOptions options;
  std::shared_ptr<Communicator> communicator;
};

Prepared prepare(const at::Tensor& input, std::string_view reduce_op, std::string_view group_name,
                 std::string_view algorithm, int64_t max_blocks) {
  Prepared prepared{check_reduction(kOp, input, reduce_op, algorithm, max_blocks),
                    registry::require(kOp, group_name)};
  check_device(kOp, "input", input, *prepared.communicator);
  prepared.communicator->require_usable(kOp);
  return prepared;
}

}  // namespace

at::Tensor allreduce(const at::Tensor& input, std::string_view reduce_op,
                     std::string_view group_name, std::string_view algorithm, int64_t max_blocks) {
  const Prepared p = prepare(input, reduce_op, group_name, algorithm, max_blocks);
  const OnDevice guard(input.device());
  at::Tensor output = make_output(input.sizes(), input);
  run(*p.communicator, p.options, *input.expect_contiguous(), output);
  return output;
}

void allreduce_out(const at::Tensor& input, std::string_view reduce_op, std::string_view group_name,
                   std::string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  const Prepared p = prepare(input, reduce_op, group_name, algorithm, max_blocks);
  check_out_like(kOp, input, out);
  check_overlap(kOp, input, out);
  const OnDevice guard(input.device());
  if (out.is_contiguous()) {
    run(*p.communicator, p.options, *input.expect_contiguous(), out);
    return;
  }
  const at::Tensor dense = make_output(input.sizes(), input);
  run(*p.communicator, p.options, *input.expect_contiguous(), dense);
  out.copy_(dense);
}

void allreduce_inplace(at::Tensor& input, std::string_view reduce_op, std::string_view group_name,
                       std::string_view algorithm, int64_t max_blocks) {
  const Prepared p = prepare(input, reduce_op, group_name, algorithm, max_blocks);
  check_writable(kOp, "input", input);
  const OnDevice guard(input.device());
  if (input.is_contiguous()) {
    run(*p.communicator, p.options, input, input);
    return;
  }
  const at::Tensor dense = input.contiguous();
  run(*p.communicator, p.options, dense, dense);
  input.copy_(dense);
}

}  // namespace collx
