// The arithmetic of every algorithm: W arrays reduced in rank order into one, element by element.
//
// One template (reduce_template.h) is compiled for each level of vector instructions, and the
// level is picked at run time. All levels give the same bits, NaN payloads included apart from
// which of two NaN operands wins.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "../../protocol/types.h"

namespace collx::cpu {

/// output[i] = inputs[0][i] op ... op inputs[world-1][i], for i < numel. Any alignment; `output`
/// may be one of the inputs. Expects a FloatEnvironment.
using ReduceKernel = void (*)(const void* const* inputs, int world, void* output, uint64_t numel);

using ReduceOpKernels = std::array<ReduceKernel, static_cast<size_t>(ReduceOp::count)>;
using ReduceKernelTable = std::array<ReduceOpKernels, static_cast<size_t>(DType::count)>;

enum class SimdLevel : uint8_t { portable, avx2, avx512 };

/// The best that this machine has, unless set otherwise.
SimdLevel simd_level();
/// For tests: all later calls of this process take this level. False if the machine lacks it.
bool set_simd_level(SimdLevel level);

/// std::invalid_argument for avg of integers.
ReduceKernel reduce_kernel(DType dtype, ReduceOp op);

const ReduceKernelTable& portable_kernels();
const ReduceKernelTable& avx2_kernels();
const ReduceKernelTable& avx512_kernels();

}  // namespace collx::cpu
