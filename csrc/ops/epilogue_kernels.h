// Converts epilogues to the form that kernels take.
#pragma once

#include <optional>
#include <vector>

#include "../cpu/row_epilogue.h"
#include "communicator.h"
#include "epilogue.h"

namespace collx {

/// Whether the kernels of a reduction apply its epilogue. Otherwise the caller applies it to the
/// reduced tensor.
bool in_kernels(const Communicator& communicator, Algorithm asked);

/// The epilogue of a call whose kernels apply it. It is created on the stack, next to the call.
class KernelEpilogue {
 public:
  /// `output` is contiguous. `call` is a reduction; its `epilogue` will point to this object.
  template <typename Call>
  void use(const Communicator& communicator, Algorithm asked, const char* op,
           const Epilogue* epilogue, const at::Tensor& output, Call& call) {
    if (epilogue == nullptr || !in_kernels(communicator, asked)) return;
#if COLLX_CUDA
    call.epilogue = &on_cuda(op, *epilogue, output.sizes(), is_whole(*epilogue, output));
#endif
    (void)op, (void)output, (void)call;
  }

  /// For a normalization, whose kernels apply the epilogue on every device and in every algorithm.
  /// `sizes` are those of its results; each row of the results is a row of the call.
  void use_for_rows(const Communicator& communicator, const char* op, const Epilogue& epilogue,
                    at::IntArrayRef sizes, NormCall& call);

 private:
  void place(const Epilogue& epilogue, at::IntArrayRef sizes, EpilogueArguments& arguments);

#if COLLX_CUDA
  /// `whole`: EpilogueForm::whole for the output.
  cuda::EpilogueCall& on_cuda(const char* op, const Epilogue& epilogue, at::IntArrayRef sizes,
                              bool whole);
  static bool is_whole(const Epilogue& epilogue, const at::Tensor& output);

  std::optional<cuda::EpilogueCall> call_;
#endif
  std::optional<cpu::RowEpilogue> rows_;
  std::vector<at::Tensor> copies_;  // contiguous copies of extras with too many dimensions
};

}  // namespace collx
