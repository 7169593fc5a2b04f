// Fused normalizations through the process group.
#include <algorithm>
#include <array>

#include "../cpu/calls.h"
#include "../protocol/partition.h"
#include "bounded_gather.h"
#include "fallback.h"
#if COLLX_CUDA
#include <c10/cuda/CUDAStream.h>

#include "../cuda/calls.h"
#endif

namespace collx {

namespace {

template <typename T>
T* behind(T* address, uint64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return address == nullptr ? nullptr : reinterpret_cast<Byte*>(address) + bytes;
}

/// The call for a range of its rows. `start` counts within the results.
NormCall rows_of(NormCall call, uint64_t start, uint64_t count) {
  const NormOptions& o = call.options;
  const uint64_t elements = start * call.cols;
  const uint64_t bytes = elements * static_cast<uint64_t>(dtype_size(call.dtype));
  const uint64_t scales = o.scale_mode == ScaleMode::group
                              ? elements / static_cast<uint64_t>(o.quant_group_size)
                          : o.scale_mode == ScaleMode::row ? start
                                                           : 0;
  call.rows = count;
  call.first_row += start;
  call.residual = behind(static_cast<const char*>(call.residual), bytes);
  call.residual_out = behind(static_cast<char*>(call.residual_out), bytes);
  call.normalized = behind(static_cast<char*>(call.normalized), bytes);
  call.quantized = behind(static_cast<char*>(call.quantized), elements);
  call.scale = behind(static_cast<char*>(call.scale), scales * scale_bytes(o.scale_type));
  return call;
}

}  // namespace

void normalize_locally(const void* const* inputs, int world, const NormCall& call,
                       const at::Tensor& like) {
  if (call.rows == 0) return;
  if (like.is_cpu()) return cpu::normalize(inputs, world, call);
#if COLLX_CUDA
  cuda::normalize(inputs, world, call,
                  c10::cuda::getCurrentCUDAStream(like.device().index()).stream());
#endif
}

void fallback_norm(Communicator& communicator, const char* op, const NormCall& call,
                   const at::Tensor& input) {
  BoundedGather gather(communicator, op, call.descriptor);
  const int world = communicator.options().world_size;
  const Part own = call.scatters() ? partition(call.rows, world, communicator.options().rank)
                                   : Part{0, call.rows};
  const uint64_t row_bytes = call.cols * static_cast<uint64_t>(dtype_size(call.dtype));
  // Column-major scales cannot be written for a part of the rows.
  const uint64_t step =
      call.options.column_major
          ? std::max<uint64_t>(call.rows, 1)
          : std::max<uint64_t>(fallback_chunk_bytes(world, call.dtype) / row_bytes, 1);
  // A view of rows would not work, since an axis of one element may have any stride.
  const at::Tensor elements = input.as_strided({input.numel()}, {1}, input.storage_offset());
  const auto cols = static_cast<int64_t>(call.cols);
  for (uint64_t start = 0; start < call.rows; start += step) {
    const uint64_t count = std::min(step, call.rows - start);
    const at::Tensor bytes =
        elements.narrow(0, static_cast<int64_t>(start) * cols, static_cast<int64_t>(count) * cols)
            .view(at::kByte);
    const at::Tensor gathered = gather(bytes).to(input.device());
    const uint64_t first = std::max(start, own.start);
    const uint64_t last = std::min(start + count, own.start + own.count);
    if (first >= last) continue;
    std::array<const void*, kMaxRanks> inputs{};
    for (int rank = 0; rank < world; ++rank) {
      inputs[static_cast<size_t>(rank)] =
          static_cast<const char*>(gathered.const_data_ptr()) +
          (static_cast<uint64_t>(rank) * count + first - start) * row_bytes;
    }
    normalize_locally(inputs.data(), world, rows_of(call, first - own.start, last - first), input);
  }
}

}  // namespace collx
