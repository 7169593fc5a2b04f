// Functions that the operators share to convert tensors and arguments into a backend's call.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <optional>

#include "../protocol/call.h"
#include "../protocol/norm_plan.h"
#include "../protocol/selection.h"
#include "communicator.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace collx {

/// Creates a contiguous tensor on the device of `like`, by default with the same dtype. It uses the
/// allocator directly, because dispatch would take a significant part of the time of a small call.
at::Tensor make_output(at::IntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype);
inline at::Tensor make_output(at::IntArrayRef sizes, const at::Tensor& like) {
  return make_output(sizes, like, like.scalar_type());
}

/// Copies the request into the descriptor.
void describe_call(const CallCore& core, CallDescriptor& descriptor);
/// Copies sizes and dtype of `tensor` into the descriptor.
void describe_tensor(const at::Tensor& tensor, CallDescriptor& descriptor);

/// Sets the addresses at which the peers' tensors are mapped, for those that are symmetric.
void map_peers(const Communicator& communicator, const std::optional<SymmetricRange>& input,
               const std::optional<SymmetricRange>& output, Call& call);

/// Sets whether the tensors are symmetric, and whether they have multicast addresses.
void place_in(Request& request, const std::optional<SymmetricRange>& input,
              const std::optional<SymmetricRange>& output);

/// A request to the selection, with the communicator's values filled in.
Request request_of(const Communicator& communicator, const CallCore& core);

/// The plan of a call. Both calls and `explain` use these functions.
Plan plan_call(const Communicator& communicator, const Request& request);
NormPlan plan_call(const Communicator& communicator, NormRequest request);

/// Makes a CUDA device the current one during its lifetime.
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

/// Calls a function on a device and ignores errors, for destructors. Any thread may run them, and
/// on a device that it has not used, most calls of the CUDA runtime create a context.
template <typename Function>
void end_on(const c10::Device& device, const Function& function) noexcept {
  try {
    const OnDevice guard(device);
    function();
  } catch (const std::exception&) {
    return;  // the device has failed, or the process is exiting
  }
}

}  // namespace collx
