// The arithmetic of every algorithm: it reduces W arrays in rank order to one, element by element.
//
// One template (reduce_template.h) is compiled for each level of vector instructions, and the level
// is selected at run time. All levels give the same bits, including NaN payloads, except which of
// two NaN operands wins.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "../../protocol/types.h"

namespace collx::cpu {

/// output[i] = inputs[0][i] op ... op inputs[world-1][i] for i < numel, written to each of the
/// `copies` outputs. Any alignment is allowed, and an output may be one of the inputs.
struct Reduction {
  const void* const* inputs;
  int world;
  void* const* outputs;
  int copies;
  uint64_t numel;
};

/// Expects a FloatEnvironment.
using ReduceKernel = void (*)(const Reduction& reduction);
/// memcpy for cache lines that peers hold. Addresses may be null only if there are no bytes.
using CopyKernel = void (*)(void* to, const void* from, uint64_t bytes);

using ReduceOpKernels = std::array<ReduceKernel, static_cast<size_t>(ReduceOp::count)>;
using ReduceKernelTable = std::array<ReduceOpKernels, static_cast<size_t>(DType::count)>;

struct Kernels {
  ReduceKernelTable reduce;
  CopyKernel copy;
};

enum class SimdLevel : uint8_t { portable, avx2, avx512 };

/// The best level of this machine, unless set otherwise.
SimdLevel simd_level();
/// For tests: all later calls of this process use this level. Returns false if the machine does not
/// support it.
bool set_simd_level(SimdLevel level);

/// Throws std::invalid_argument for avg of integers.
ReduceKernel reduce_kernel(DType dtype, ReduceOp op);
CopyKernel copy_kernel();

}  // namespace collx::cpu
