#include "epilogue_kernels.h"

#include <algorithm>

#if COLLX_CUDA
#include "run_time_compiler.h"
#endif

namespace collx {

bool in_kernels(const Communicator& communicator, Algorithm asked) {
  return communicator.on_cuda() && communicator.has_regions() &&
         communicator.options().world_size > 1 && has_kernels(asked);
}

namespace {

/// Describes `extra` broadcast to `sizes`. Returns false if it has too many dimensions.
bool lay_out(const at::Tensor& extra, at::IntArrayRef sizes, DType dtype, ExtraTensor& to) {
  std::vector<int64_t> strides(sizes.size(), 0);
  const size_t missing = sizes.size() - static_cast<size_t>(extra.dim());
  for (size_t d = missing; d < sizes.size(); ++d) {
    const auto of = static_cast<int64_t>(d - missing);
    if (extra.size(of) != 1) strides[d] = extra.stride(of);
  }
  return lay_out_extra(extra.const_data_ptr(), sizes.data(), strides.data(),
                       static_cast<int>(sizes.size()), dtype_size(dtype), to);
}

}  // namespace

void KernelEpilogue::place(const Epilogue& epilogue, at::IntArrayRef sizes,
                           EpilogueArguments& arguments) {
  const Expression& expression = epilogue.known->expression;
  const DType dtype = epilogue.known->dtype;
  if (epilogue.value.defined()) arguments.value = epilogue.value.mutable_data_ptr();
  for (size_t i = 0; i < static_cast<size_t>(expression.extras); ++i) {
    if (lay_out(epilogue.extras[i], sizes, dtype, arguments.extra[i])) continue;
    copies_.push_back(epilogue.extras[i].expand(sizes).contiguous());
    lay_out(copies_.back(), sizes, dtype, arguments.extra[i]);
  }
  int numbers = 0;
  for (size_t k = 0; epilogue.bound && k < expression.statements.size(); ++k) {
    if (expression.statements[k].what == Do::number) {
      arguments.number[numbers++] = epilogue.bound->statements[k].number;
    }
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
}

#if COLLX_CUDA
bool KernelEpilogue::is_whole(const Epilogue& epilogue, const at::Tensor& output) {
  const auto aligned = [](const at::Tensor& t, int64_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    return address % std::min<uint64_t>(bytes, kVectorBytes) == 0;
  };
  // The number of elements in a vector of the value.
  const int64_t count = kVectorBytes / dtype_size(epilogue.known->dtype);
  return output.numel() % count == 0 && aligned(output, count * output.element_size()) &&
         (!epilogue.value.defined() || aligned(epilogue.value, kVectorBytes));
}

cuda::EpilogueCall& KernelEpilogue::on_cuda(const char* op, const Epilogue& epilogue,
                                            at::IntArrayRef sizes, bool whole) {
  const KnownExpression& known = *epilogue.known;
  auto& call = call_.emplace(known.kernels, op, make_kernel, !getting_ready());
  place(epilogue, sizes, call.arguments);
  call.form = form_of(call.arguments, known.expression.extras, whole);
  return call;
}
#endif

void KernelEpilogue::use_for_rows(const Communicator& communicator, const char* op,
                                  const Epilogue& epilogue, at::IntArrayRef sizes, NormCall& call) {
  call.descriptor.epilogue = epilogue.known->hash;
  if (!communicator.on_cuda()) {
    call.row_epilogue = &rows_.emplace(epilogue.expression());
    return place(epilogue, sizes, rows_->arguments);
  }
#if COLLX_CUDA
  // Each row begins with a new vector. Vectors are aligned either in all rows or not in all.
  const bool whole = call.cols * static_cast<uint64_t>(dtype_size(call.dtype)) % kVectorBytes == 0;
  cuda::EpilogueCall& made = on_cuda(op, epilogue, sizes, whole);
  call.epilogue = &made;
  if (whole) return;
  for (ExtraTensor& extra : made.arguments.extra) {
    if (extra.lies == Lies::vectors) extra.lies = Lies::anywhere;
  }
#endif
  (void)op;
}

}  // namespace collx
