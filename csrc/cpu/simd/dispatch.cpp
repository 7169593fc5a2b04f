#include <atomic>
#include <stdexcept>
#include <string>

#include "../../protocol/names.h"
#include "expression_kernels.h"
#include "norm_kernels.h"
#include "reduce_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace collx::cpu {
namespace {

#if defined(__x86_64__)
// Some compilers do not accept f16c in __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

bool supported(SimdLevel level) {
  if (level == SimdLevel::portable) return true;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  if (level == SimdLevel::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

SimdLevel best() {
  if (supported(SimdLevel::avx512)) return SimdLevel::avx512;
  return supported(SimdLevel::avx2) ? SimdLevel::avx2 : SimdLevel::portable;
}

std::atomic<SimdLevel>& current() {
  static std::atomic<SimdLevel> level{best()};
  return level;
}

const Kernels& kernels(SimdLevel level) {
  if (level == SimdLevel::avx512) return avx512_kernels();
  return level == SimdLevel::avx2 ? avx2_kernels() : portable_kernels();
}

const NormKernelTable& norm_kernels(SimdLevel level) {
  if (level == SimdLevel::avx512) return avx512_norm_kernels();
  return level == SimdLevel::avx2 ? avx2_norm_kernels() : portable_norm_kernels();
}

}  // namespace

SimdLevel simd_level() { return current().load(std::memory_order_relaxed); }

bool set_simd_level(SimdLevel level) {
  if (!supported(level)) return false;
  current().store(level, std::memory_order_relaxed);
  return true;
}

ReduceKernel reduce_kernel(DType dtype, ReduceOp op) {
  const ReduceKernel kernel =
      kernels(simd_level()).reduce[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
  if (kernel == nullptr) {
    throw std::invalid_argument("reduce op " + std::string(name_of(op)) +
                                " is not defined for dtype " + std::string(name_of(dtype)));
  }
  return kernel;
}

ExpressionKernel expression_kernel() {
  const SimdLevel level = simd_level();
  if (level == SimdLevel::avx512) return avx512_expression_kernel();
  return level == SimdLevel::avx2 ? avx2_expression_kernel() : portable_expression_kernel();
}

CopyKernel copy_kernel() { return kernels(simd_level()).copy; }

const NormKernels& norm_kernels(DType dtype) {
  const NormKernelTable& table = norm_kernels(simd_level());
  if (static_cast<size_t>(dtype) >= table.size()) {
    throw std::invalid_argument("normalizations are not defined for dtype " +
                                std::string(name_of(dtype)));
  }
  return table[static_cast<size_t>(dtype)];
}

}  // namespace collx::cpu
