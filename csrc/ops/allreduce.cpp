#include "allreduce.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "../cpu/allreduce.h"
#include "../protocol/selection.h"
#include "checks.h"
#include "communicator.h"
#include "errors.h"
#include "fallback.h"
#include "registry.h"
#if COLLX_CUDA
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/allreduce.h"
#endif

namespace collx {

namespace {

constexpr const char* kOp = "allreduce";

at::Tensor make_output(const at::Tensor& like) {
  // Straight to the allocator: the dispatcher's way to it costs a good part of a small call.
#if COLLX_CUDA
  if (like.is_cuda()) {
    return at::Tensor(at::detail::empty_cuda(like.sizes(), like.scalar_type(), like.device(),
                                             c10::MemoryFormat::Contiguous));
  }
#endif
  return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type(), /*pin_memory=*/false,
                                          c10::MemoryFormat::Contiguous));
}

void describe_call(const at::Tensor& input, const ReductionOptions& options, AllreduceCall& call) {
  CallDescriptor& d = call.descriptor;
  d.collective = Collective::allreduce;
  d.dtype = options.dtype;
  d.reduce_op = options.reduce_op;
  d.algorithm = call.plan.algorithm;
  d.max_blocks = options.max_blocks;
  d.numel = call.numel;
  const at::IntArrayRef sizes = input.sizes();
  d.dims = static_cast<int32_t>(sizes.size());
  constexpr size_t kKept = sizeof(d.sizes) / sizeof(d.sizes[0]);
  for (size_t i = 0; i < sizes.size() && i < kKept; ++i) d.sizes[i] = sizes[i];
}

void map_peers(const Communicator& communicator, const std::optional<SymmetricRange>& input,
               const std::optional<SymmetricRange>& output, AllreduceCall& call) {
  for (size_t rank = 0; rank < static_cast<size_t>(communicator.options().world_size); ++rank) {
    if (input) call.peer_input[rank] = input->allocation->pointers[rank] + input->offset;
    if (output) call.peer_output[rank] = output->allocation->pointers[rank] + output->offset;
  }
  if (input) call.descriptor.input_offset = input->place();
  if (output) call.descriptor.output_offset = output->place();
  call.descriptor.symmetric = (input ? 1u : 0u) | (output ? 2u : 0u);
}

Plan make_plan(const Communicator& communicator, const ReductionOptions& options, uint64_t bytes,
               bool input_symmetric, bool output_symmetric) {
  Request request;
  request.device = communicator.on_cuda() ? DeviceKind::cuda : DeviceKind::cpu;
  request.dtype = options.dtype;
  request.bytes = bytes;
  request.world = communicator.options().world_size;
  request.input_symmetric = input_symmetric;
  request.output_symmetric = output_symmetric;
  request.algorithm = options.algorithm;
  request.max_blocks = options.max_blocks;
  request.room = communicator.options().blocks;
  request.spare_room = communicator.spare_blocks();
  request.capabilities.peer_access = communicator.has_regions();
  return communicator.tuned(select(request));
}

void run_on_cpu(Communicator& communicator, const RankView& view, const AllreduceCall& call) {
  if (!cpu::allreduce(view, call)) communicator.require_usable(kOp);
}

#if COLLX_CUDA
void run_on_cuda(Communicator& communicator, const RankView& view, const AllreduceCall& call) {
  cuda::allreduce(view, call, communicator.streams().enter());
}
#endif

/// Before a fallback the ranks meet in their regions, if they have any, in a checked call without
/// data: there a missing rank has a name, and the process group, which a collective that never
/// ends would spoil for everybody, is not touched before all have come.
void meet(Communicator& communicator, AllreduceCall call) {
  call.numel = 0;
  call.plan = Plan{Algorithm::oneshot_push, 1, communicator.on_cuda() ? 64 : 1};
  RankView view = communicator.view();
  view.check = true;
  if (!communicator.on_cuda()) return run_on_cpu(communicator, view, call);
#if COLLX_CUDA
  run_on_cuda(communicator, view, call);
  c10::cuda::getCurrentCUDAStream(communicator.options().device.index()).synchronize();
  communicator.require_usable(kOp);
#endif
}

void run_fallback(Communicator& communicator, const AllreduceCall& call, const at::Tensor& input,
                  const at::Tensor& output) {
#if COLLX_CUDA
  if (communicator.on_cuda()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !capturing(communicator.options().device), "collx.", kOp,
        ": algorithm: \"fallback\" waits on the host and cannot be captured into a CUDA graph; "
        "accepted during a capture: the algorithms on peer memory");
    communicator.streams().enter();
  }
#endif
  if (communicator.has_regions()) meet(communicator, call);
  fallback_allreduce(communicator, kOp, call, input, output);
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
    run_fallback(communicator, call, input, output);
  } else if (!communicator.on_cuda()) {
    run_on_cpu(communicator, communicator.view(), call);
  } else {
#if COLLX_CUDA
    run_on_cuda(communicator, communicator.view(), call);
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

/// Makes the tensor's device the current one for as long as it lives.
class OnDevice {
 public:
#if COLLX_CUDA
  explicit OnDevice(const at::Tensor& tensor)
      : guard_(tensor.is_cuda() ? std::optional(tensor.device()) : std::nullopt) {}

 private:
  c10::cuda::OptionalCUDAGuard guard_;
#else
  explicit OnDevice(const at::Tensor&) {}
#endif
};

}  // namespace

at::Tensor allreduce(const at::Tensor& input, std::string_view reduce_op,
                     std::string_view group_name, std::string_view algorithm, int64_t max_blocks) {
  const Prepared p = prepare(input, reduce_op, group_name, algorithm, max_blocks);
  const OnDevice guard(input);
  at::Tensor output = make_output(input);
  run(*p.communicator, p.options, *input.expect_contiguous(), output);
  return output;
}

void allreduce_out(const at::Tensor& input, std::string_view reduce_op, std::string_view group_name,
                   std::string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  const Prepared p = prepare(input, reduce_op, group_name, algorithm, max_blocks);
  check_out_like(kOp, input, out);
  check_overlap(kOp, input, out);
  const OnDevice guard(input);
  if (out.is_contiguous()) {
    run(*p.communicator, p.options, *input.expect_contiguous(), out);
    return;
  }
  const at::Tensor dense = make_output(input);
  run(*p.communicator, p.options, *input.expect_contiguous(), dense);
  out.copy_(dense);
}

void allreduce_inplace(at::Tensor& input, std::string_view reduce_op, std::string_view group_name,
                       std::string_view algorithm, int64_t max_blocks) {
  const Prepared p = prepare(input, reduce_op, group_name, algorithm, max_blocks);
  check_writable(kOp, "input", input);
  const OnDevice guard(input);
  if (input.is_contiguous()) {
    run(*p.communicator, p.options, input, input);
    return;
  }
  const at::Tensor dense = input.contiguous();
  run(*p.communicator, p.options, dense, dense);
  input.copy_(dense);
}

}  // namespace collx
