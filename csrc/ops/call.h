// What the operators share on their way from tensors to a backend's call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../protocol/call.h"
#include "../protocol/norm_plan.h"
#include "../protocol/selection.h"
#include "communicator.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace collx {

/// A contiguous tensor on that device, by default of that dtype, straight from the allocator: the
/// dispatcher's way to it costs a good part of a small call.
at::Tensor make_output(at::IntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype);
inline at::Tensor make_output(at::IntArrayRef sizes, const at::Tensor& like) {
  return make_output(sizes, like, like.scalar_type());
}

/// The request, in the descriptor.
void describe_call(const CallCore& core, CallDescriptor& descriptor);
/// Sizes and dtype of `tensor` for the descriptor.
void describe_tensor(const at::Tensor& tensor, CallDescriptor& descriptor);

/// Where the peers' copies of the tensors are mapped, for those that are symmetric.
void map_peers(const Communicator& communicator, const std::optional<SymmetricRange>& input,
               const std::optional<SymmetricRange>& output, Call& call);

/// Whether tensors, and those of which all ranks' are at one address, are symmetric.
void place_in(Request& request, const std::optional<SymmetricRange>& input,
              const std::optional<SymmetricRange>& output);

/// The communicator's part of a request to the selection.
Request request_of(const Communicator& communicator, const CallCore& core);

/// How a call is carried out. Both the call and `explain` ask these functions.
Plan plan_call(const Communicator& communicator, const Request& request);
NormPlan plan_call(const Communicator& communicator, NormRequest request);

/// Makes a CUDA device the current one for as long as it lives.
class OnDevice {
 public:
#if COLLX_CUDA
  explicit OnDevice(const c10::Device& device)
      : guard_(device.is_cuda() ? std::optional(device) : std::nullopt) {}

 private:
  c10::cuda::OptionalCUDAGuard guard_;
#else
  explicit OnDevice(const c10::Device&) {}
#endif
};

}  // namespace collx
