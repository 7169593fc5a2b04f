// Epilogues as the kernels take them.
#pragma once

#include <optional>
#include <vector>

#include "communicator.h"
#include "epilogue.h"

namespace collx {

/// Whether the kernels of a call have its epilogue in them. Otherwise the caller applies it to what
/// they reduced.
bool in_kernels(const Communicator& communicator, Algorithm asked);

/// The epilogue of a call whose kernels have it. Made on the stack, beside the call.
class KernelEpilogue {
 public:
  /// `output`: contiguous. `call`: whatever has an `epilogue`, which points here then.
  template <typename Call>
  void use(const Communicator& communicator, Algorithm asked, const char* op,
           const Epilogue* epilogue, const at::Tensor& output, Call& call) {
    if (epilogue == nullptr || !in_kernels(communicator, asked)) return;
#if COLLX_CUDA
    call.epilogue = &prepare(op, *epilogue, output, call.dtype);
#endif
    (void)op, (void)output, (void)call;
  }

#if COLLX_CUDA
 private:
  const cuda::EpilogueCall& prepare(const char* op, const Epilogue& epilogue,
                                    const at::Tensor& output, DType dtype);

  std::optional<cuda::EpilogueCall> call_;
  std::vector<at::Tensor> copies_;  // of extras that lie in too many runs
#endif
};

}  // namespace collx
