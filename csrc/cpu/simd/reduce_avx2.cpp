#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "reduce_kernels.h"

// Below the includes: what they define is compiled for any machine.
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c")
#endif

#define COLLX_SIMD_LEVEL avx2
#include "reduce_template.h"

namespace collx::cpu {

const ReduceKernelTable& avx2_kernels() { return avx2::kTable; }

}  // namespace collx::cpu
