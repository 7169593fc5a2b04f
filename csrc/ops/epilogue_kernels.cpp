#include "epilogue_kernels.h"

#if COLLX_CUDA
#include "run_time_compiler.h"
#endif

namespace collx {

bool in_kernels(const Communicator& communicator, Algorithm asked) {
  return communicator.on_cuda() && communicator.has_regions() &&
         communicator.options().world_size > 1 && asked != Algorithm::fallback;
}

namespace {

/// `extra` broadcast to `sizes`. False where its elements lie in too many runs.
bool lay_out(const at::Tensor& extra, at::IntArrayRef sizes, DType dtype, ExtraTensor& to) {
  std::vector<int64_t> strides(sizes.size(), 0);
  const size_t missing = sizes.size() - static_cast<size_t>(extra.dim());
  for (size_t d = missing; d < sizes.size(); ++d) {
    const auto of = static_cast<int64_t>(d - missing);
    if (extra.size(of) != 1) strides[d] = extra.stride(of);
  }
  return collx::lay_out(extra.const_data_ptr(), sizes.data(), strides.data(),
                        static_cast<int>(sizes.size()), dtype_size(dtype), to);
}

}  // namespace

EpilogueArguments KernelEpilogue::arguments_of(const Epilogue& epilogue, at::IntArrayRef sizes,
                                               DType dtype) {
  const Expression& expression = epilogue.known.expression;
  EpilogueArguments arguments;
  if (epilogue.value != nullptr) arguments.value = epilogue.value->mutable_data_ptr();
  for (size_t i = 0; i < static_cast<size_t>(expression.extras); ++i) {
    if (lay_out(epilogue.extras[i], sizes, dtype, arguments.extra[i])) continue;
    copies_.push_back(epilogue.extras[i].expand(sizes).contiguous());
    lay_out(copies_.back(), sizes, dtype, arguments.extra[i]);
  }
  uint64_t below = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (d < static_cast<size_t>(expression.indices)) {
      const bool moved = static_cast<int64_t>(d) == epilogue.origin.axis;
      arguments.coordinate[d] = {below, static_cast<uint64_t>(sizes[d]),
                                 moved ? epilogue.origin.start : 0};
    }
    below *= static_cast<uint64_t>(sizes[d]);
  }
  return arguments;
}

#if COLLX_CUDA
cuda::EpilogueCall& KernelEpilogue::on_cuda(const char* op, const Epilogue& epilogue,
                                            at::IntArrayRef sizes, DType dtype) {
  return call_.emplace(cuda::EpilogueCall{epilogue.known.kernels, op, make_kernel, !getting_ready(),
                                          arguments_of(epilogue, sizes, dtype)});
}
#endif

void KernelEpilogue::use_for_rows(const Communicator& communicator, const char* op,
                                  const Epilogue& epilogue, at::IntArrayRef sizes, NormCall& call) {
  call.descriptor.row_epilogue = epilogue.known.hash;
  if (!communicator.on_cuda()) {
    call.row_epilogue = &rows_.emplace(
        cpu::RowEpilogue{epilogue.known.expression, arguments_of(epilogue, sizes, call.dtype)});
    return;
  }
#if COLLX_CUDA
  cuda::EpilogueCall& made = on_cuda(op, epilogue, sizes, call.dtype);
  call.epilogue = &made;
  if (call.cols * static_cast<uint64_t>(dtype_size(call.dtype)) % kVectorBytes == 0) return;
  // Each row begins with a vector of its own, which then is not aligned in all of them.
  for (ExtraTensor& extra : made.arguments.extra) {
    if (extra.lies == Lies::vectors) extra.lies = Lies::anywhere;
  }
#endif
  (void)op;
}

}  // namespace collx
