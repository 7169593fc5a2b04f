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

namespace portable {
extern const Kernels kKernels;
extern const NormKernelTable kNormKernels;
void evaluate(const Expression& expression, const Line& line);
}  // namespace portable
namespace avx2 {
extern const Kernels kKernels;
extern const NormKernelTable kNormKernels;
void evaluate(const Expression& expression, const Line& line);
}  // namespace avx2
namespace avx512 {
extern const Kernels kKernels;
extern const NormKernelTable kNormKernels;
void evaluate(const Expression& expression, const Line& line);
}  // namespace avx512

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

struct Level {
  const Kernels* kernels;
  const NormKernelTable* norms;
  ExpressionKernel evaluate;
};
constexpr Level kLevels[] = {
    {&portable::kKernels, &portable::kNormKernels, portable::evaluate},
    {&avx2::kKernels, &avx2::kNormKernels, avx2::evaluate},
    {&avx512::kKernels, &avx512::kNormKernels, avx512::evaluate},
};

const Level& chosen() { return kLevels[static_cast<size_t>(simd_level())]; }

}  // namespace

SimdLevel simd_level() { return current().load(std::memory_order_relaxed); }

bool set_simd_level(SimdLevel level) {
  if (!supported(level)) return false;
  current().store(level, std::memory_order_relaxed);
  return true;
}

ReduceKernel reduce_kernel(DType dtype, ReduceOp op) {
  const ReduceKernel kernel =
      chosen().kernels->reduce[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
  if (kernel == nullptr) {
    throw std::invalid_argument("reduce op " + std::string(name_of(op)) +
                                " is not defined for dtype " + std::string(name_of(dtype)));
  }
  return kernel;
}

ExpressionKernel expression_kernel() { return chosen().evaluate; }

CopyKernel copy_kernel() { return chosen().kernels->copy; }

const NormKernels& norm_kernels(DType dtype) {
  const NormKernelTable& table = *chosen().norms;
  if (static_cast<size_t>(dtype) >= table.size()) {
    throw std::invalid_argument("normalizations are not defined for dtype " +
                                std::string(name_of(dtype)));
  }
  return table[static_cast<size_t>(dtype)];
}

}  // namespace collx::cpu
