#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "reduce_kernels.h"

// Below the includes: what they define is compiled for any machine.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
#endif

#define COLLX_SIMD_LEVEL avx512
#include "reduce_template.h"

namespace collx::cpu {

const ReduceKernelTable& avx512_kernels() { return avx512::kTable; }

}  // namespace collx::cpu
