// Epilogues as the kernels take them.
#pragma once

#include <optional>
#include <vector>

#include "../cpu/row_epilogue.h"
#include "communicator.h"
#include "epilogue.h"

namespace collx {

/// Whether the kernels of a reduction have its epilogue in them. Otherwise the caller applies it to
/// what they reduced.
bool in_kernels(const Communicator& communicator, Algorithm asked);

/// The epilogue of a call whose kernels have it. Made on the stack, beside the call.
class KernelEpilogue {
 public:
  /// `output`: contiguous. `call`: of a reduction; its `epilogue` points here then.
  template <typename Call>
  void use(const Communicator& communicator, Algorithm asked, const char* op,
           const Epilogue* epilogue, const at::Tensor& output, Call& call) {
    if (epilogue == nullptr || !in_kernels(communicator, asked)) return;
#if COLLX_CUDA
    call.epilogue = &on_cuda(op, *epilogue, output.sizes(), is_whole(*epilogue, output));
#endif
    (void)op, (void)output, (void)call;
  }

  /// Of a normalization, whose kernels have it on every device and in every algorithm. `sizes`: of
  /// its results, of which each row is one of the call's.
  void use_for_rows(const Communicator& communicator, const char* op, const Epilogue& epilogue,
                    at::IntArrayRef sizes, NormCall& call);

 private:
  void place(const Epilogue& epilogue, at::IntArrayRef sizes, EpilogueArguments& arguments);

#if COLLX_CUDA
  /// `whole`: as EpilogueForm has it, of the output.
  cuda::EpilogueCall& on_cuda(const char* op, const Epilogue& epilogue, at::IntArrayRef sizes,
                              bool whole);
  static bool is_whole(const Epilogue& epilogue, const at::Tensor& output);

  std::optional<cuda::EpilogueCall> call_;
#endif
  std::optional<cpu::RowEpilogue> rows_;
  std::vector<at::Tensor> copies_;  // of extras that lie in too many runs
};

}  // namespace collx
