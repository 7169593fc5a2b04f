#include "call.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

#if COLLX_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace collx {

at::Tensor make_output(at::IntArrayRef sizes, [[maybe_unused]] const at::Tensor& like,
                       at::ScalarType dtype) {
#if COLLX_CUDA
  if (like.is_cuda()) {
    return at::Tensor(
        at::detail::empty_cuda(sizes, dtype, like.device(), c10::MemoryFormat::Contiguous));
  }
#endif
  return at::Tensor(
      at::detail::empty_cpu(sizes, dtype, /*pin_memory=*/false, c10::MemoryFormat::Contiguous));
}

void describe_call(const CallCore& core, CallDescriptor& d) {
  d.collective = core.collective;
  d.dtype = core.dtype;
  d.reduce_op = core.reduce_op;
  d.root = static_cast<int16_t>(core.root);
  d.max_blocks = core.max_blocks;
}

void describe_tensor(const at::Tensor& tensor, CallDescriptor& d) {
  d.scalar_type = static_cast<uint8_t>(1 + static_cast<int>(tensor.scalar_type()));
  d.numel = static_cast<uint64_t>(tensor.numel());
  const at::IntArrayRef sizes = tensor.sizes();
  d.dims = static_cast<uint8_t>(sizes.size());
  constexpr size_t kKept = sizeof(d.sizes) / sizeof(d.sizes[0]);
  for (size_t i = 0; i < sizes.size() && i < kKept; ++i) d.sizes[i] = sizes[i];
}

void map_peers(const Communicator& communicator, const std::optional<SymmetricRange>& input,
               const std::optional<SymmetricRange>& output, Call& call) {
  for (size_t rank = 0; rank < static_cast<size_t>(communicator.options().world_size); ++rank) {
    if (input) call.peer_input[rank] = input->allocation->pointers[rank] + input->offset;
    if (output) call.peer_output[rank] = output->allocation->pointers[rank] + output->offset;
  }
  const auto at_once = [](const SymmetricRange& range) -> char* {
    char* const all = range.allocation->multicast;
    return all == nullptr ? nullptr : all + range.offset;
  };
  if (input) call.multicast_input = at_once(*input);
  if (output) call.multicast_output = at_once(*output);
  if (input) call.descriptor.input_offset = input->place();
  if (output) call.descriptor.output_offset = output->place();
  call.descriptor.symmetric =
      static_cast<uint8_t>((input ? kInputSymmetric : 0) | (output ? kOutputSymmetric : 0));
}

void place_in(Request& request, const std::optional<SymmetricRange>& input,
              const std::optional<SymmetricRange>& output) {
  request.input_symmetric = input.has_value();
  request.output_symmetric = output.has_value();
  request.input_multicast = input && input->allocation->multicast != nullptr;
  request.output_multicast = output && output->allocation->multicast != nullptr;
}

Request request_of(const Communicator& communicator, const CallCore& core) {
  Request request;
  static_cast<CallCore&>(request) = core;
  request.device = communicator.on_cuda() ? DeviceKind::cuda : DeviceKind::cpu;
  request.world = communicator.options().world_size;
  request.room = communicator.options().blocks;
  request.deterministic =
      communicator.deterministic() || at::globalContext().deterministicAlgorithms();
  request.overlap = communicator.options().overlap;
  request.capabilities = communicator.options().capabilities;
  request.capabilities.peer_access = communicator.has_regions();
  if (communicator.on_cuda()) {
    request.spare_room = communicator.spare_blocks();
    if (communicator.has_regions()) {
      request.lanes = static_cast<int>(communicator.cuda_layout().lanes.lanes);
    }
  }
  return request;
}

Plan plan_call(const Communicator& communicator, const Request& request) {
  const TuningEntry* const entry = communicator.tuning().find(request);
  if (entry == nullptr) [[likely]]
    return communicator.tuned(select(request));
  return communicator.tuned(select(with_choice(request, entry)));
}

NormPlan plan_call(const Communicator& communicator, NormRequest request) {
  request.tuned_blocks = communicator.tuned_blocks();
  request.tuned_threads = communicator.tuned_threads();
  return plan_norm(request, communicator.cuda_layout());
}

}  // namespace collx
